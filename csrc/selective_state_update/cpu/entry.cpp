// CPU entry point of selective_state_update: chooses the instruction set and distributes blocks of rows over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "selective_state_update/cpu/kernels.h"
#include "selective_state_update/selective_state_update_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::selective_state_update {

SSM_DEFINE_CPU_KERNELS()

namespace {

constexpr char kCpuOp[] = "selective_state_update";

void run(const StateUpdateParams& params, const TokenParams* tokens, int64_t steps) {
  const CpuKernels& kernel = cpu_kernels();
  const Blocking blocking(params, kernel.vector_size(params));
  // A thread gets at least 16384 states, below which starting it costs more than it saves.
  const int64_t grain = std::max<int64_t>(1, 16384 / (blocking.block_channels * params.dstate * steps));
  at::parallel_for(0, blocking.blocks, grain,
                   [&](int64_t begin, int64_t end) { kernel.update_blocks(params, tokens, blocking, begin, end); });
}

NoResult cpu_out(const OutInputs& in) {
  const Discretization method = check_out_inputs(in);
  TokenParams tokens;
  const StateUpdateParams params = make_out_params(in, method, tokens);
  const bool has_table = is_present(in.state_batch_indices) && in.state_batch_indices->dim() == 2;
  check_decoding_values(kCpuOp, in.decoding(), tokens.rows, params.slots, has_table ? in.state_batch_indices->size(1) : 1);
  if (in.out.numel() == 0) return {};
  const int64_t steps = tokens.rows.tokens / (is_present(in.cu_seqlens) ? params.batch : 1);
  run(params, in.is_one_step() ? nullptr : &tokens, std::max<int64_t>(1, steps));
  return {};
}

at::Tensor cpu(const Inputs& in) {
  const Discretization method = check_inputs(in);
  at::Tensor out = allocate_out(in);
  if (!in.is_one_step()) {
    cpu_out(OutInputs(in, out));
    return out;
  }
  const StateUpdateParams params = make_params(in, method, out);
  check_slot_indices(kCpuOp, in.state_batch_indices, params.slots);
  if (out.numel() > 0) run(params, /*tokens=*/nullptr, /*steps=*/1);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  implement<&cpu>(m, "selective_state_update");
  implement<&cpu_out>(m, "selective_state_update_out");
}

}  // namespace ssm_kernels::selective_state_update
