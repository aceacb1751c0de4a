// CPU entry point of delta_rule_step: chooses the instruction set and distributes blocks of rows over threads.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "delta_rule_step/cpu/kernels.h"
#include "delta_rule_step/delta_rule_step_op.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::delta_rule_step {

SSM_DEFINE_CPU_KERNELS()

namespace {

constexpr char kCpuOp[] = "delta_rule_step";

struct Cpu {
  using Inputs = delta_rule_step::Inputs;
  using TokenParams = delta_rule_step::TokenParams;
  struct Guard {
    explicit Guard(const Inputs&) {}
  };

  static void check_values(const Inputs& in, const StepParams& params) {
    check_slot_indices(kCpuOp, in.state_batch_indices, params.slots);
  }

  static void check_values(const OutInputs& in, const StepParams& params, const DecodingRows& rows) {
    check_decoding_values(kCpuOp, in.decoding(), rows, params.slots, /*most_accepted=*/rows.read_slots.columns);
  }

  static void run(const Inputs&, const StepParams& params, const TokenParams* tokens) {
    const CpuKernels& kernel = cpu_kernels();
    const Blocking blocking(params);
    ThreadScratch scratch(kScratchBytes);
    const int64_t steps = tokens == nullptr ? 1 : tokens_per_row(tokens->rows);
    const int64_t work = std::min(params.value_dim, kBlockRows) * params.key_dim * params.updates * steps;
    scratch.parallel_for(blocking.blocks, work, [&](int64_t block, std::byte* memory) {
      kernel.update_block(params, tokens, blocking, block, memory);
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  implement<&DecodingKernels<Cpu>::step>(m, "delta_rule_step");
  implement<&DecodingKernels<Cpu>::out>(m, "delta_rule_step_out");
}

}  // namespace ssm_kernels::delta_rule_step
