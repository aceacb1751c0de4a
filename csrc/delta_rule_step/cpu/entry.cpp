// CPU entry point of delta_rule_step: chooses the instruction set and distributes blocks of rows over threads.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "delta_rule_step/cpu/kernels.h"
#include "delta_rule_step/delta_rule_step_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::delta_rule_step {

SSM_DEFINE_CPU_KERNELS()

namespace {

constexpr char kCpuOp[] = "delta_rule_step";

void run(const StepParams& params, const TokenParams* tokens, int64_t steps) {
  const CpuKernels& kernel = cpu_kernels();
  const Blocking blocking(params);
  ThreadScratch scratch(kScratchBytes);
  const int64_t work = std::min(params.value_dim, kBlockRows) * params.key_dim * params.updates * steps;
  scratch.parallel_for(blocking.blocks, work,
                       [&](int64_t block, std::byte* memory) { kernel.update_block(params, tokens, blocking, block, memory); });
}

NoResult cpu_out(const OutInputs& in) {
  check_out_inputs(in);
  TokenParams tokens;
  const StepParams params = make_out_params(in, tokens);
  const bool has_table = is_present(in.state_batch_indices) && in.state_batch_indices->dim() == 2;
  check_decoding_values(kCpuOp, in.decoding(), tokens.rows, params.slots, has_table ? in.state_batch_indices->size(1) : 1);
  if (in.out.numel() == 0) return {};
  const int64_t steps = tokens.rows.tokens / (is_present(in.cu_seqlens) ? std::max<int64_t>(1, params.rows) : 1);
  run(params, in.is_one_step() ? nullptr : &tokens, std::max<int64_t>(1, steps));
  return {};
}

at::Tensor cpu(const Inputs& in) {
  check_inputs(in);
  at::Tensor out = allocate_out(in);
  if (!in.is_one_step()) {
    cpu_out(OutInputs(in, out));
    return out;
  }
  const StepParams params = make_params(in, out);
  check_slot_indices(kCpuOp, in.state_batch_indices, params.slots);
  if (out.numel() > 0) run(params, /*tokens=*/nullptr, /*steps=*/1);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  implement<&cpu>(m, "delta_rule_step");
  implement<&cpu_out>(m, "delta_rule_step_out");
}

}  // namespace ssm_kernels::delta_rule_step
