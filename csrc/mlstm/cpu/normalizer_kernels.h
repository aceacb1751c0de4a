// The kernel of mlstm_scan's normalizer on the CPU for one instruction set. normalizer_entry.cpp is compiled once,
// normalizer_kernel.cpp once per instruction set.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "mlstm/mlstm.h"

namespace ssm_kernels::mlstm {

struct CpuKernels {
  // All steps of one head of a sequence. Rows of q and k are contiguous, all tensors have the type `kind`, float or double, and
  // final_n holds the normalizer before the first step. `scratch` has key_dim doubles.
  void (*normalize_head)(const NormalizerParams&, ScalarKind kind, int64_t sequence, int64_t head, void* scratch);
};

SSM_KERNEL_STRUCT(CpuKernels, 8);

}  // namespace ssm_kernels::mlstm
