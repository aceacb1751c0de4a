// CPU entry points of the causal convolution: check values, choose the instruction set, run tasks on threads.

#include "causal_conv1d/cpu/kernels.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "causal_conv1d/causal_conv1d_op.h"
#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::causal_conv1d {

SSM_DEFINE_CPU_KERNELS()

namespace {

template <typename Body>
void for_each_task(const ConvParams& params, const Tasks& tasks, const Body& body) {
  ThreadScratch threads(cpu_kernels().scratch_bytes(params.width, tasks.channels));
  threads.parallel_for(tasks.count, params.seqlen * tasks.channels, body);
}

struct Cpu {
  struct Guard {
    explicit Guard(const Inputs& in) {
      if (is_present(in.cu_seqlens)) check_cu_seqlens_values("causal_conv1d", *in.cu_seqlens, in.x.size(1));
    }
  };

  static void run(const ConvFwdParams& params, const at::Tensor&) {
    const Tasks tasks(params, at::get_num_threads());
    for_each_task(params, tasks,
                  [&](int64_t task, std::byte* scratch) { cpu_kernels().fwd_task(params, tasks, task, scratch); });
  }

  static bool adds_grads(const ConvBwdParams&) { return false; }

  static void run(const ConvBwdParams& params, const at::Tensor&) {
    const Tasks tasks(params, at::get_num_threads());
    const bool needs_sums = params.grad_weight != nullptr || params.grad_bias != nullptr;
    const int64_t bytes = needs_sums ? cpu_kernels().sum_bytes(params, tasks) : 0;
    const at::Tensor memory = empty_tensor({tasks.count * bytes}, at::kByte);
    std::byte* const sums = static_cast<std::byte*>(memory.mutable_data_ptr());
    for_each_task(params, tasks, [&](int64_t task, std::byte* scratch) {
      cpu_kernels().bwd_task(params, tasks, task, scratch, needs_sums ? sums + task * bytes : nullptr);
    });
    if (!needs_sums) return;
    at::parallel_for(0, tasks.blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) cpu_kernels().finish(params, tasks, block, sums);
    });
  }

  struct Steps {
    using Inputs = UpdateInputs;
    using TokenParams = ConvTokenParams;
    struct Guard {
      explicit Guard(const UpdateInputs&) {}
    };
    static constexpr char kUpdate[] = "causal_conv1d_update";

    static void check_values(const UpdateInputs& in, const ConvUpdateParams& params) {
      check_slot_indices(kUpdate, in.state_batch_indices, params.slots);
    }

    static void check_values(const UpdateOutInputs& in, const ConvUpdateParams& params, const DecodingRows& rows) {
      const int64_t length = params.state_length, past = params.width - 1;
      check_decoding_values(kUpdate, in.decoding(), rows, params.slots, length - past + 1);
      for (int64_t b = 0; rows.num_accepted_tokens.data != nullptr && b < rows.rows; ++b) {
        TORCH_CHECK_VALUE(past - 1 + rows.tokens_of(b).count <= length, kUpdate,
                          ": expected conv_state of at least width - 2 + ", rows.tokens_of(b).count, " steps for row ", b,
                          " with num_accepted_tokens, got ", in.conv_state.sizes());
      }
    }

    static void run(const UpdateInputs&, const ConvUpdateParams& params, const ConvTokenParams* tokens) {
      const ConvFwdParams steps = conv_params(params);
      const Tasks tasks(steps, at::get_num_threads());
      for_each_task(steps, tasks,
                    [&](int64_t task, std::byte* scratch) { cpu_kernels().update_task(params, tokens, tasks, task, scratch); });
    }
  };
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { Kernels<Cpu>::register_in(m); }

}  // namespace ssm_kernels::causal_conv1d
