// The kernel of mamba3_state_update on the CPU for one instruction set. step_entry.cpp is compiled once, step_kernel.cpp once
// per instruction set.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "mamba3/mamba3_step.h"

namespace ssm_kernels::mamba3::step {

struct CpuKernels {
  // One head of a row. `scratch` has scratch_bytes().
  void (*update_head)(const StepParams&, int64_t row, int64_t head, void* scratch);
};

SSM_KERNEL_STRUCT(CpuKernels, 8);

// A phase and a cosine and a sine of each angle, one row of dstate elements and one of headdim, and for each rank three and one
// more of these, of 8 bytes each and rounded up to whole vectors.
constexpr int64_t scratch_bytes(const StepParams& p) {
  return (3 * p.angles + (3 * p.ranks + 1) * (p.dstate + 16) + (p.ranks + 1) * (p.headdim + 16)) * 8;
}

}  // namespace ssm_kernels::mamba3::step
