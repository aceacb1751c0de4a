// The kernel of mlstm_step on the CPU for one instruction set. step_entry.cpp is compiled once, step_kernel.cpp once per
// instruction set.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "mlstm/mlstm_step.h"

namespace ssm_kernels::mlstm::step {

// The key and the query of a head, and a row of C that is not contiguous, in the accumulation type.
constexpr int64_t kScratchBytes = 3 * kMaxKeyDim * 8;

struct CpuKernels {
  // The memory of one head, of one row of the call. `scratch` has kScratchBytes, aligned to 64.
  void (*update_head)(const StepParams&, int64_t row, int64_t head, void* scratch);
};

SSM_KERNEL_STRUCT(CpuKernels, 8);

}  // namespace ssm_kernels::mlstm::step
