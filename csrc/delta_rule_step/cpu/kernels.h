// Blocks of the CPU's delta rule step, and the kernel of one instruction set. entry.cpp is compiled once, kernel.cpp once per
// instruction set.
//
// A block is up to kBlockRows rows of the state of one head, of one row of the call.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "delta_rule_step/delta_rule_step.h"

namespace ssm_kernels::delta_rule_step {

constexpr int64_t kBlockRows = 32;
// The states of a block that a kernel carries from token to token.
constexpr int64_t kScratchBytes = kBlockRows * kMaxKeyDim * 8;

struct Blocking {
  int64_t blocks_per_head, blocks;

  explicit Blocking(const StepParams& p)
      : blocks_per_head((p.value_dim + kBlockRows - 1) / kBlockRows), blocks(p.rows * p.value_heads * blocks_per_head) {}
};

// The kernel of one instruction set.
struct CpuKernels {
  // `tokens` is null where each row has one token and one slot. `scratch` has kScratchBytes, aligned to 64.
  void (*update_block)(const StepParams&, const TokenParams* tokens, const Blocking&, int64_t block, void* scratch);
};

SSM_KERNEL_STRUCT(Blocking, 16);
SSM_KERNEL_STRUCT(CpuKernels, 8);

}  // namespace ssm_kernels::delta_rule_step
