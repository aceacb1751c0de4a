// The CPU's kernels of selective_scan_dense, of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"
#include "selective_scan/dense.h"

namespace ssm_kernels::selective_scan::dense {

// `task` is slot * tiles + tile. `scratch` is scratch_bytes() of 64-byte aligned memory of the calling thread's own.
struct CpuKernels {
  // Reduces a matrix, (dstate, dstate) in the accumulation type with these strides.
  void (*reduce)(const void* A, int64_t stride_row, int64_t stride_column, int64_t dstate, bool is_double, void* T, void* Q);
  int64_t (*scratch_bytes)(ScalarKind);
  void (*fwd_task)(const SelectiveScanFwdParams&, const DenseParams&, ScalarKind, int64_t task, std::byte* scratch);
  void (*bwd_task)(const SelectiveScanBwdParams&, const DenseParams&, const DenseSums&, ScalarKind, int64_t task,
                   std::byte* scratch);
};

SSM_KERNEL_STRUCT(CpuKernels, 32);

}  // namespace ssm_kernels::selective_scan::dense
