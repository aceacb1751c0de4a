// The kernels of Mamba-3's rotation on the CPU for one instruction set. rotation_entry.cpp is compiled once,
// rotation_kernel.cpp once per instruction set.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "mamba3/mamba3.h"

namespace ssm_kernels::mamba3 {

struct CpuKernels {
  // All steps of one head of a sequence. `scratch` has scratch_bytes().
  void (*rotate_head)(const RotationParams&, int64_t sequence, int64_t head, void* scratch);
  void (*unrotate_head)(const RotationParams&, int64_t sequence, int64_t head, void* scratch);
};

SSM_KERNEL_STRUCT(CpuKernels, 16);

// A phase and a cosine and a sine of each angle, and a row, of 8 bytes each.
constexpr int64_t scratch_bytes(const RotationParams& p) { return (3 * p.angles + p.dstate) * 8; }

}  // namespace ssm_kernels::mamba3
