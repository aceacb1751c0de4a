// CPU entry point of selective_state_update: chooses the instruction set and distributes blocks of rows over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "cpu/capability.h"
#include "selective_state_update/cpu/kernels.h"
#include "selective_state_update/selective_state_update_op.h"
#include "selective_state_update/two_sample_op.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::selective_state_update {

SSM_DEFINE_CPU_KERNELS()

namespace {

constexpr char kCpuOp[] = "selective_state_update";

void update(const StateUpdateParams& params, const MethodParameters& method, const TokenParams* tokens,
            const TwoSampleParams* two_samples) {
  const CpuKernels& kernel = cpu_kernels();
  const Blocking blocking(params, method, kernel.vector_size(params), two_samples);
  const int64_t steps = tokens == nullptr ? 1 : tokens_per_row(tokens->rows);
  // A thread gets at least 16384 states, below which starting it costs more than it saves.
  const int64_t grain = std::max<int64_t>(1, 16384 / (blocking.block_channels * params.dstate * steps));
  at::parallel_for(0, blocking.blocks, grain,
                   [&](int64_t begin, int64_t end) { kernel.update_blocks(params, tokens, blocking, begin, end); });
}

// Copies the samples of the steps whose states were written to the same slots. All blocks have read the previous ones.
void store_samples(const StateUpdateParams& p, const TokenParams* tokens, const TwoSampleParams& two_samples, int64_t x_bytes,
                   int64_t B_bytes) {
  const auto copy = [](void* target, int64_t to, const void* source, int64_t from, int64_t element_bytes) {
    std::memcpy(static_cast<std::byte*>(target) + to * element_bytes,
                static_cast<const std::byte*>(source) + from * element_bytes, element_bytes);
  };
  const auto store = [&](int64_t slot, int64_t b, int64_t token) {
    const ChannelView &x = p.x, &previous_x = two_samples.previous_x;
    const int64_t x_at = b * x.stride_batch + token * (tokens == nullptr ? 0 : tokens->x);
    for (int64_t head = 0; head < p.heads; ++head) {
      for (int64_t i = 0; i < p.headdim; ++i) {
        copy(previous_x.data, slot * previous_x.stride_batch + head * previous_x.stride_head + i * previous_x.stride_dim,
             x.data, x_at + head * x.stride_head + i * x.stride_dim, x_bytes);
      }
    }
    const GroupView &B = p.B, &previous_B = two_samples.previous_B;
    const int64_t B_at = b * B.stride_batch + token * (tokens == nullptr ? 0 : tokens->B);
    for (int64_t group = 0; group < p.groups; ++group) {
      for (int64_t n = 0; n < p.dstate; ++n) {
        copy(previous_B.data, slot * previous_B.stride_batch + group * previous_B.stride_group + n * previous_B.stride_state,
             B.data, B_at + group * B.stride_group + n * B.stride_state, B_bytes);
      }
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    if (tokens == nullptr) {
      if (const int64_t slot = p.indices.at(b); slot >= 0) store(slot, b, 0);
      continue;
    }
    const TokenRange range = tokens->rows.tokens_of(b);
    for (int64_t t = 0; t < range.count && tokens->rows.read_slot(b) >= 0; ++t) {
      if (const int64_t slot = tokens->rows.write_slot(b, t, range.count); slot >= 0) store(slot, b, range.first + t);
    }
  }
}

template <typename Step>
struct Cpu {
  using Inputs = Step;
  using TokenParams = selective_state_update::TokenParams;
  struct Guard {
    explicit Guard(const Inputs&) {}
  };

  static void check_values(const Inputs& in, const StateUpdateParams& params) {
    check_slot_indices(kCpuOp, in.state_batch_indices, params.slots);
  }

  static void check_values(const ServerInputs<Inputs>& in, const StateUpdateParams& params, const DecodingRows& rows) {
    check_decoding_values(kCpuOp, in.decoding(), rows, params.slots, /*most_accepted=*/rows.read_slots.columns);
  }

  static void run(const Inputs& in, const StateUpdateParams& params, const TokenParams* tokens) {
    const MethodParameters method = parse_method_parameters(in.discretization);
    if constexpr (std::is_same_v<Step, TwoSampleInputs>) {
      const bool is_packed = tokens != nullptr && tokens->rows.cu_seqlens.data != nullptr;
      const TwoSampleParams two_samples = make_two_sample_params(in, is_packed);
      update(params, method, tokens, &two_samples);
      if (two_samples.previous_x.data != nullptr) {
        store_samples(params, tokens, two_samples, in.x.element_size(), in.B.element_size());
      }
    } else {
      update(params, method, tokens, nullptr);
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  implement<&DecodingKernels<Cpu<Inputs>>::step>(m, "selective_state_update");
  implement<&DecodingKernels<Cpu<Inputs>>::out>(m, "selective_state_update_out");
  implement<&DecodingKernels<Cpu<TwoSampleInputs>>::step>(m, "selective_state_update_two_sample");
  implement<&DecodingKernels<Cpu<TwoSampleInputs>>::out>(m, "selective_state_update_two_sample_out");
}

}  // namespace ssm_kernels::selective_state_update
