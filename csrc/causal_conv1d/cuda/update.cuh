// The decoding step of the causal convolution: one thread per channel of each batch row.
//
// The state holds the last inputs of a channel. A thread computes each new step's output from the state and the steps before,
// and then rolls the state: its elements move towards the front, and the new steps become its last elements. For a single step
// and a short state, all loads come before their first use, and a contiguous state or weight of four elements takes one access.
#pragma once

#include "causal_conv1d/cuda/device.cuh"

namespace ssm_kernels::causal_conv1d {

constexpr int kUpdateThreads = 128;

template <typename Scalar>
__global__ void __launch_bounds__(kUpdateThreads) conv_update_kernel(const ConvUpdateParams p) {
  using Acc = AccumulateType<Scalar>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kUpdateThreads + threadIdx.x;
  const int64_t b = index / p.channels, c = index - b * p.channels;
  if (b >= p.batch) return;
  const int64_t slot = p.slots_of_batch.data == nullptr ? b : p.slots_of_batch.at(b, 0);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(b, 0, c);
  Scalar* const out = static_cast<Scalar*>(p.out.data) + p.out.offset(b, 0, c);
  if (slot < 0 || slot >= p.slots) {
    const Scalar value = from_accumulate<Scalar>(slot < 0 ? Acc(0) : static_cast<Acc>(nan("")));
    for (int64_t t = 0; t < p.seqlen; ++t) out[t * p.out.stride_step] = value;
    return;
  }
  // Calls visitor with a pointer to the channel's state, of the state's own type.
  const auto visit_state = [&](const auto& visitor) {
    const int64_t offset = p.state.offset(slot, c, 0);
    return p.state_is_input_kind ? visitor(static_cast<Scalar*>(p.state.data) + offset)
                                 : visitor(static_cast<Acc*>(p.state.data) + offset);
  };
  const auto load_state = [&](int64_t i) {
    return visit_state([&](const auto* state) { return to_accumulate(state[i * p.state.stride_step]); });
  };
  const auto store_state = [&](int64_t i, Acc value) {
    visit_state([&](auto* state) { state[i * p.state.stride_step] = from_accumulate<std::decay_t<decltype(*state)>>(value); });
  };
  const auto load_tap = [&](int64_t tap) {
    return load_parameter<Scalar>(p.weight, c * p.weight.stride_channel + tap * p.weight.stride_tap);
  };
  const Acc bias = p.bias.data == nullptr ? Acc(0) : load_parameter<Scalar>(p.bias, c * p.bias.stride_channel);

  if (p.seqlen == 1 && p.state_length <= kMaxVectorWidth) {
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
    if (p.has_state_vectors) {
      visit_state([&](auto* state) {
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
  // Element i of the state followed by the new steps.
  const auto element = [&](int64_t i) {
    return i < p.state_length ? load_state(i) : to_accumulate(x[(i - p.state_length) * p.x.stride_step]);
  };
  for (int64_t t = 0; t < p.seqlen; ++t) {
    Acc pre = bias;
    for (int64_t tap = p.width - 1; tap >= 0; --tap) {
      pre = Math<Acc>::fma(load_tap(tap), element(p.state_length + t - (p.width - 1) + tap), pre);
    }
    out[t * p.out.stride_step] = from_accumulate<Scalar>(p.has_silu ? silu(pre) : pre);
  }
  for (int64_t i = 0; i < p.state_length; ++i) store_state(i, element(i + p.seqlen));
}

}  // namespace ssm_kernels::causal_conv1d
