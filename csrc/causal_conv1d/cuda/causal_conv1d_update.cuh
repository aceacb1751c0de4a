// The decoding step of the causal convolution: a thread for each channel of each batch entry. It sums the taps of each new
// step, from the state and the steps before, then rolls the state: its elements move towards the front, the new steps become
// its last.
#pragma once

#include "causal_conv1d/cuda/causal_conv1d_device.cuh"

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
  const auto state_at = [&](int64_t i) {
    const int64_t offset = p.state.offset(slot, c, i);
    return p.state_is_input_kind ? to_accumulate(static_cast<const Scalar*>(p.state.data)[offset])
                                 : static_cast<const Acc*>(p.state.data)[offset];
  };
  // The i-th of the state's elements and the new steps after them.
  const auto element = [&](int64_t i) {
    return i < p.state_length ? state_at(i) : to_accumulate(x[(i - p.state_length) * p.x.stride_step]);
  };
  for (int64_t t = 0; t < p.seqlen; ++t) {
    Acc pre = p.bias.data == nullptr ? Acc(0) : load_parameter<Scalar>(p.bias, c * p.bias.stride_channel);
    for (int64_t tap = 0; tap < p.width; ++tap) {
      const Acc weight = load_parameter<Scalar>(p.weight, c * p.weight.stride_channel + tap * p.weight.stride_tap);
      pre = Math<Acc>::fma(weight, element(p.state_length + t - (p.width - 1) + tap), pre);
    }
    out[t * p.out.stride_step] = from_accumulate<Scalar>(p.has_silu ? silu(pre) : pre);
  }
  for (int64_t i = 0; i < p.state_length; ++i) {
    const Acc value = element(i + p.seqlen);
    const int64_t offset = p.state.offset(slot, c, i);
    if (p.state_is_input_kind) {
      static_cast<Scalar*>(p.state.data)[offset] = from_accumulate<Scalar>(value);
    } else {
      static_cast<Acc*>(p.state.data)[offset] = value;
    }
  }
}

}  // namespace ssm_kernels::causal_conv1d
