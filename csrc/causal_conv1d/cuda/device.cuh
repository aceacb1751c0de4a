// Device functions that the convolution's kernels share: parameters, inputs before a step, states, the activation's derivative.
#pragma once

#include "causal_conv1d/cuda/launch.h"
#include "common/activations.h"
#include "cuda/vector_io.cuh"

namespace ssm_kernels::causal_conv1d {

using cuda::AccumulateType;
using cuda::from_accumulate;
using cuda::to_accumulate;

// Steps before a segment that the vector kernels read; backward also reads as many after it.
constexpr int kHalo = kMaxVectorWidth - 1;

template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_parameter(const ParameterView& view, int64_t offset) {
  return view.is_input_kind ? to_accumulate(static_cast<const Scalar*>(view.data)[offset])
                            : static_cast<const AccumulateType<Scalar>*>(view.data)[offset];
}

// weight[c, width - 1 - lag], the factor of x_{t - lag}.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_weight(const ConvParams& p, int64_t c, int64_t lag) {
  return load_parameter<Scalar>(p.weight, c * p.weight.stride_channel + (p.width - 1 - lag) * p.weight.stride_tap);
}

template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_bias(const ConvParams& p, int64_t c) {
  return p.bias.data == nullptr ? AccumulateType<Scalar>(0) : load_parameter<Scalar>(p.bias, c * p.bias.stride_channel);
}

// The taps of `vector` channels, `distance` apart, by lag, zero beyond the width, and their biases, in registers. At a distance
// of more than one, channels beyond the last have zeros.
template <typename Scalar, int vector, int distance = 1>
struct Taps {
  using Acc = AccumulateType<Scalar>;
  Acc weight[kMaxVectorWidth][vector], bias[vector];

  Taps() = default;
  __device__ __forceinline__ Taps(const ConvParams& p, int width, int64_t c) {
    const auto load = [&](const auto* row) {
      row += c * p.weight.stride_channel + (width - 1) * p.weight.stride_tap;
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        const auto* tap = row + i * distance * p.weight.stride_channel;
        const bool exists = distance == 1 || c + i * distance < p.channels;
#pragma unroll
        for (int lag = 0; lag < kMaxVectorWidth; ++lag, tap -= p.weight.stride_tap) {
          weight[lag][i] = exists && lag < width ? to_accumulate(*tap) : Acc(0);
        }
      }
    };
    if (p.weight.is_input_kind) {
      load(static_cast<const Scalar*>(p.weight.data));
    } else {
      load(static_cast<const Acc*>(p.weight.data));
    }
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      bias[i] = distance == 1 || c + i * distance < p.channels ? load_bias<Scalar>(p, c + i * distance) : Acc(0);
    }
  }

  // pre_t of channel i, with x_{t - lag} = x(lag): bias + sum_l weight[l] x(l), in the order of the lags.
  template <typename ValueAt>
  __device__ __forceinline__ Acc convolve(int width, int i, const ValueAt& x) const {
    return add_lags(Math<Acc>::fma(weight[0][i], x(0), bias[i]), width, i, x);
  }
  // Its adjoint, with g_{t + lag} = g(lag): sum_l weight[l] g(l).
  template <typename ValueAt>
  __device__ __forceinline__ Acc correlate(int width, int i, const ValueAt& g) const {
    return add_lags(weight[0][i] * g(0), width, i, g);
  }

 private:
  // Skips lags beyond the width, as zero times an infinity or NaN is NaN.
  template <typename ValueAt>
  __device__ __forceinline__ Acc add_lags(Acc sum, int width, int i, const ValueAt& value) const {
#pragma unroll
    for (int lag = 1; lag < kMaxVectorWidth; ++lag) {
      if (lag < width) sum = Math<Acc>::fma(weight[lag][i], value(lag), sum);
    }
    return sum;
  }
};

// The element of the initial state `missing` >= 1 steps before a sequence's first step, which is step `first` of entry b.
template <typename Scalar>
__device__ __forceinline__ Scalar load_initial(const ConvParams& p, int64_t b, int64_t first, int64_t c, int64_t missing) {
  const int64_t state = p.initial_state.data == nullptr ? -1 : p.state_of_first_step(b, first);
  if (state < 0) return from_accumulate<Scalar>(0);
  return static_cast<const Scalar*>(p.initial_state.data)[p.initial_state.offset(state, c, p.width - 1 - missing)];
}

// The same where batch rows are sequences.
template <typename Scalar>
__device__ __forceinline__ Scalar load_initial_of_row(const ConvParams& p, int64_t b, int64_t c, int64_t missing) {
  if (p.initial_state.data == nullptr) return from_accumulate<Scalar>(0);
  return static_cast<const Scalar*>(p.initial_state.data)[p.initial_state.offset(b, c, p.width - 1 - missing)];
}

// Steps from the first step of t's sequence to t, at most `most`.
__device__ __forceinline__ int64_t steps_since_first(const ConvParams& p, int64_t b, int64_t t, int64_t most) {
  if (p.ids.data == nullptr) return t < most ? t : most;
  int64_t steps = 0;
  while (steps < most && !p.is_first_step(b, t - steps)) ++steps;
  return steps;
}

// The element `lag` < width steps before step t, from x or from the initial state. `since` is steps_since_first(p, b, t, lag)
// or, with a higher limit, more.
template <typename Scalar>
__device__ __forceinline__ Scalar load_element(const ConvParams& p, int64_t b, int64_t t, int64_t c, int64_t lag,
                                               int64_t since) {
  if (lag <= since) return static_cast<const Scalar*>(p.x.data)[p.x.offset(b, t - lag, c)];
  return load_initial<Scalar>(p, b, t - since, c, lag - since);
}

// Stores the final state of the sequence that ends at step t: zero if this step is padding.
template <typename Scalar>
__device__ __forceinline__ void store_final_state(const ConvFwdParams& p, int64_t b, int64_t t, int64_t c, bool is_padding) {
  const int64_t state = p.state_of_last_step(b, t);
  if (state < 0) return;
  for (int64_t i = 0; i < p.width - 1; ++i) {
    const int64_t lag = p.width - 2 - i;
    static_cast<Scalar*>(p.final_state.data)[p.final_state.offset(state, c, i)] =
        is_padding ? from_accumulate<Scalar>(AccumulateType<Scalar>(0))
                   : load_element<Scalar>(p, b, t, c, lag, steps_since_first(p, b, t, lag));
  }
}

// The same for batch row b, which is one sequence.
template <typename Scalar>
__device__ __forceinline__ void store_final_state_of_row(const ConvFwdParams& p, int64_t b, int64_t c) {
#pragma unroll 1
  for (int64_t i = 0; i < p.width - 1; ++i) {
    const int64_t t = p.seqlen - (p.width - 1) + i;
    static_cast<Scalar*>(p.final_state.data)[p.final_state.offset(b, c, i)] =
        t >= 0 ? static_cast<const Scalar*>(p.x.data)[p.x.offset(b, t, c)] : load_initial_of_row<Scalar>(p, b, c, -t);
  }
}

template <typename Acc>
__device__ __forceinline__ Acc silu_derivative(Acc pre) {
  return ssm_kernels::silu_derivative(pre, sigmoid(pre));
}

// The final state's part of the gradient of the element `after` steps before step t, the last of its sequence.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_grad_final(const ConvBwdParams& p, int64_t b, int64_t t, int64_t c,
                                                                  int64_t after) {
  const int64_t index = p.width - 2 - after;
  const int64_t state = p.grad_final_state.data == nullptr || index < 0 ? -1 : p.state_of_last_step(b, t);
  if (state < 0) return 0;
  return to_accumulate(static_cast<const Scalar*>(p.grad_final_state.data)[p.grad_final_state.offset(state, c, index)]);
}

}  // namespace ssm_kernels::causal_conv1d
