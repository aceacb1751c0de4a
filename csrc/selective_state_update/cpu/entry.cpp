// CPU entry point of selective_state_update: chooses the instruction set and distributes blocks of rows over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "selective_state_update/cpu/kernels.h"
#include "selective_state_update/selective_state_update_op.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::selective_state_update {

SSM_DEFINE_CPU_KERNELS()

namespace {

constexpr char kCpuOp[] = "selective_state_update";

struct Cpu {
  using Inputs = selective_state_update::Inputs;
  using TokenParams = selective_state_update::TokenParams;
  struct Guard {
    explicit Guard(const Inputs&) {}
  };

  static void check_values(const Inputs& in, const StateUpdateParams& params) {
    check_slot_indices(kCpuOp, in.state_batch_indices, params.slots);
  }

  static void check_values(const OutInputs& in, const StateUpdateParams& params, const DecodingRows& rows) {
    check_decoding_values(kCpuOp, in.decoding(), rows, params.slots, /*most_accepted=*/rows.read_slots.columns);
  }

  static void run(const Inputs& in, const StateUpdateParams& params, const TokenParams* tokens) {
    const CpuKernels& kernel = cpu_kernels();
    const Blocking blocking(params, parse_method_parameters(in.discretization), kernel.vector_size(params));
    const int64_t steps = tokens == nullptr ? 1 : tokens_per_row(tokens->rows);
    // A thread gets at least 16384 states, below which starting it costs more than it saves.
    const int64_t grain = std::max<int64_t>(1, 16384 / (blocking.block_channels * params.dstate * steps));
    at::parallel_for(0, blocking.blocks, grain,
                     [&](int64_t begin, int64_t end) { kernel.update_blocks(params, tokens, blocking, begin, end); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  implement<&DecodingKernels<Cpu>::step>(m, "selective_state_update");
  implement<&DecodingKernels<Cpu>::out>(m, "selective_state_update_out");
}

}  // namespace ssm_kernels::selective_state_update
