// Blocks of the CPU's state update, and the kernel of one instruction set. entry.cpp is compiled once, kernel.cpp once per
// instruction set.
//
// A block is up to a vector of consecutive channels of one batch row, inside one group of B and C.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "selective_state_update/selective_state_update.h"

namespace ssm_kernels::selective_state_update {

struct Blocking {
  int64_t channels_per_group, block_channels, blocks_per_group, blocks;
  MethodParameters method;
  const TwoSampleParams* two_samples;  // null for methods that read one, with one step

  Blocking(const StateUpdateParams& p, const MethodParameters& method, int64_t block_channels,
           const TwoSampleParams* two_samples)
      : channels_per_group(p.channels() / p.groups),
        block_channels(block_channels),
        blocks_per_group((channels_per_group + block_channels - 1) / block_channels),
        blocks(p.batch * p.groups * blocks_per_group),
        method(method),
        two_samples(two_samples) {}
};

// The kernel of one instruction set.
struct CpuKernels {
  int64_t (*vector_size)(const StateUpdateParams&);
  // `tokens` is null where each row has one token and one slot.
  void (*update_blocks)(const StateUpdateParams&, const TokenParams* tokens, const Blocking&, int64_t begin, int64_t end);
};

SSM_KERNEL_STRUCT(Blocking, 48);
SSM_KERNEL_STRUCT(CpuKernels, 16);

}  // namespace ssm_kernels::selective_state_update
