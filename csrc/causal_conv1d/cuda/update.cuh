// The decoding step of the causal convolution: one thread per channel of each batch row.
//
// The state holds the last inputs of a channel. A thread computes each new step's output from the state and the steps before,
// and then rolls the state: its elements move towards the front, and the new steps become its last elements. For a single step
// and a short state, all loads come before their first use, and a contiguous state or weight of four elements takes one access.
// A second kernel of the same code serves packed steps, slots to read from and to write to, accepted drafts and windows.
#pragma once

#include "causal_conv1d/cuda/taps.cuh"

namespace ssm_kernels::causal_conv1d {

constexpr int kUpdateThreads = 128;

// In place of ConvTokenParams in the kernel without them.
struct OneSlot {};

template <typename Scalar, typename Tokens>
__device__ __forceinline__ void update_channel(const ConvUpdateParams& p, const Tokens& tokens) {
  using Acc = AccumulateType<Scalar>;
  constexpr bool has_tokens = std::is_same_v<Tokens, ConvTokenParams>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kUpdateThreads + threadIdx.x;
  const int64_t b = index / p.channels, c = index - b * p.channels;
  if (b >= p.batch) return;
  int64_t slot, write;
  TokenRange range{0, p.seqlen};
  if constexpr (has_tokens) {
    slot = tokens.rows.read_slot(b);
    range = tokens.rows.tokens_of(b);
    write = tokens.rows.write_slot(b, range.count - 1, range.count);
    if (range.count == 0) return;
  } else {
    slot = write = p.slots_of_batch.data == nullptr ? b : p.slots_of_batch.at(b, 0);
  }
  const bool writes = !has_tokens || (write >= 0 && write < p.slots);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(b, range.first, c);
  Scalar* const out = static_cast<Scalar*>(p.out.data) + p.out.offset(b, range.first, c);
  if (slot < 0 || slot >= p.slots) {
    const Scalar value = from_accumulate<Scalar>(slot < 0 ? Acc(0) : static_cast<Acc>(nan("")));
    for (int64_t t = 0; t < range.count; ++t) out[t * p.out.stride_step] = value;
    return;
  }
  // Calls visitor with a pointer to the channel's state in a slot, of the state's own type.
  const auto visit_state_in = [&](int64_t slot, const auto& visitor) {
    const int64_t offset = p.state.offset(slot, c, 0);
    return p.state_is_input_kind ? visitor(static_cast<Scalar*>(p.state.data) + offset)
                                 : visitor(static_cast<Acc*>(p.state.data) + offset);
  };
  const auto visit_state = [&](const auto& visitor) { return visit_state_in(slot, visitor); };
  const auto load_state = [&](int64_t i) {
    return visit_state([&](const auto* state) { return to_accumulate(state[i * p.state.stride_step]); });
  };
  const auto store_state = [&](int64_t i, Acc value) {
    visit_state_in(
        write, [&](auto* state) { state[i * p.state.stride_step] = from_accumulate<std::decay_t<decltype(*state)>>(value); });
  };
  const auto load_tap = [&](int64_t tap) {
    return load_parameter<Scalar>(p.weight, c * p.weight.stride_channel + tap * p.weight.stride_tap);
  };
  const Acc bias = p.bias.data == nullptr ? Acc(0) : load_parameter<Scalar>(p.bias, c * p.bias.stride_channel);

  bool is_short = range.count == 1 && p.state_length <= kMaxVectorWidth;
  if constexpr (has_tokens) {
    is_short = is_short && tokens.rows.num_accepted_tokens.data == nullptr && !tokens.rows.has_intermediate;
  }
  if (is_short) {
    const int width = static_cast<int>(p.width), length = static_cast<int>(p.state_length);
    Acc inputs[kMaxVectorWidth + 1], weight[kMaxVectorWidth + 1];  // by lag; a state has at least width - 1 elements
    inputs[0] = to_accumulate(x[0]);
    const auto load_weight = [&](const auto* weights) {
      const auto loaded = cuda::Vector<std::decay_t<decltype(*weights)>, kMaxVectorWidth>::load(weights);
#pragma unroll
      for (int lag = 0; lag < kMaxVectorWidth; ++lag) weight[lag] = loaded.accumulate(kMaxVectorWidth - 1 - lag);
      weight[kMaxVectorWidth] = 0;
    };
    if (p.has_state_vectors) {
      visit_state([&](const auto* state) {
        const auto loaded = cuda::Vector<std::decay_t<decltype(*state)>, kMaxVectorWidth>::load(state);
#pragma unroll
        for (int lag = 1; lag <= kMaxVectorWidth; ++lag) inputs[lag] = loaded.accumulate(kMaxVectorWidth - lag);
      });
    } else {
#pragma unroll
      for (int lag = 1; lag <= kMaxVectorWidth; ++lag) inputs[lag] = lag <= length ? load_state(length - lag) : Acc(0);
    }
    if (p.has_weight_vectors && p.weight.is_input_kind) {
      load_weight(static_cast<const Scalar*>(p.weight.data) + c * kMaxVectorWidth);
    } else if (p.has_weight_vectors) {
      load_weight(static_cast<const Acc*>(p.weight.data) + c * kMaxVectorWidth);
    } else {
#pragma unroll
      for (int lag = 0; lag <= kMaxVectorWidth; ++lag) weight[lag] = lag < width ? load_tap(width - 1 - lag) : Acc(0);
    }
    Acc pre = bias;
#pragma unroll
    for (int lag = 0; lag <= kMaxVectorWidth; ++lag) {
      if (lag < width) pre = Math<Acc>::fma(weight[lag], inputs[lag], pre);
    }
    out[0] = from_accumulate<Scalar>(p.has_silu ? silu(pre) : pre);
    if (!writes) return;
    if (p.has_state_vectors) {
      visit_state_in(write, [&](auto* state) {
        using State = std::decay_t<decltype(*state)>;
        cuda::Vector<State, kMaxVectorWidth> rolled;
#pragma unroll
        for (int lag = 1; lag <= kMaxVectorWidth; ++lag) {
          rolled.set(kMaxVectorWidth - lag, from_accumulate<State>(inputs[lag - 1]));
        }
        rolled.store(state);
      });
    } else {
#pragma unroll
      for (int lag = 1; lag <= kMaxVectorWidth; ++lag) {
        if (lag <= length) store_state(length - lag, inputs[lag - 1]);
      }
    }
    return;
  }
  Roll roll{};
  if constexpr (has_tokens) roll = roll_of(p, tokens.rows, b, range.count);
  // Read from the params, they take no registers.
  const auto end = [&] { return has_tokens ? roll.end : p.state_length; };
  // Element i of the state followed by the new steps.
  const auto element = [&](int64_t i) { return i < end() ? load_state(i) : to_accumulate(x[(i - end()) * p.x.stride_step]); };
  for (int64_t t = 0; t < range.count; ++t) {
    Acc pre = bias;
    for (int64_t tap = p.width - 1; tap >= 0; --tap) {
      pre = Math<Acc>::fma(load_tap(tap), element(end() + t - (p.width - 1) + tap), pre);
    }
    out[t * p.out.stride_step] = from_accumulate<Scalar>(p.has_silu ? silu(pre) : pre);
  }
  if constexpr (has_tokens) {
    const int64_t entry = tokens.rows.intermediate_entry(b);
    const bool has_entry = entry >= 0 && entry < tokens.rows.intermediate_count;
    for (int64_t t = 0; has_entry && t < range.count && t < tokens.rows.intermediate_tokens; ++t) {
      const int64_t offset = tokens.windows.offset(entry, c, 0) + t * tokens.windows_token;
      for (int64_t i = 0; i < p.width - 1; ++i) {
        const Acc value = element(end() + t + 2 - p.width + i);
        const int64_t place = offset + i * tokens.windows.stride_step;
        if (p.state_is_input_kind) {
          static_cast<Scalar*>(tokens.windows.data)[place] = from_accumulate<Scalar>(value);
        } else {
          static_cast<Acc*>(tokens.windows.data)[place] = value;
        }
      }
    }
  }
  if (!writes) return;
  for (int64_t i = 0; i < (has_tokens ? roll.count : p.state_length); ++i) {
    store_state(i, element(i + (has_tokens ? roll.shift : p.seqlen)));
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kUpdateThreads) conv_update_kernel(const ConvUpdateParams p) {
  update_channel<Scalar>(p, OneSlot());
}

template <typename Scalar>
__global__ void __launch_bounds__(kUpdateThreads)
    conv_update_tokens_kernel(const ConvUpdateParams p, const ConvTokenParams tokens) {
  update_channel<Scalar>(p, tokens);
}

}  // namespace ssm_kernels::causal_conv1d
