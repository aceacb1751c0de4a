// Device functions that the causal convolution's kernels share: elements before a step, parameters, the activation.
#pragma once

#include "causal_conv1d/cuda/launch.h"
#include "common/activations.h"
#include "cuda/vector_io.cuh"

namespace ssm_kernels::causal_conv1d {

using cuda::AccumulateType;
using cuda::from_accumulate;
using cuda::to_accumulate;

// Steps before a step that the vector kernels look at, and in backward after it.
constexpr int kBefore = kMaxVectorWidth - 1;

template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_parameter(const ParameterView& view, int64_t offset) {
  return view.is_input_kind ? to_accumulate(static_cast<const Scalar*>(view.data)[offset])
                            : static_cast<const AccumulateType<Scalar>*>(view.data)[offset];
}

// weight[c, width - 1 - lag], what x_{t - lag} is multiplied with.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_weight(const ConvParams& p, int64_t c, int64_t lag) {
  return load_parameter<Scalar>(p.weight, c * p.weight.stride_channel + (p.width - 1 - lag) * p.weight.stride_tap);
}

template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_bias(const ConvParams& p, int64_t c) {
  return p.bias.data == nullptr ? AccumulateType<Scalar>(0) : load_parameter<Scalar>(p.bias, c * p.bias.stride_channel);
}

// The element that lies `missing` >= 1 steps before a sequence's first step, at step `first`.
template <typename Scalar>
__device__ __forceinline__ Scalar load_initial(const ConvParams& p, int64_t b, int64_t first, int64_t c, int64_t missing) {
  const int64_t state = p.initial_state.data == nullptr ? -1 : p.state_of_first_step(b, first);
  if (state < 0) return from_accumulate<Scalar>(0);
  return static_cast<const Scalar*>(p.initial_state.data)[p.initial_state.offset(state, c, p.width - 1 - missing)];
}

// How many steps before t the sequence of t begins, or `most` if it begins earlier.
__device__ __forceinline__ int64_t steps_since_first(const ConvParams& p, int64_t b, int64_t t, int64_t most) {
  if (p.ids.data == nullptr) return t < most ? t : most;
  int64_t steps = 0;
  while (steps < most && !p.is_first_step(b, t - steps)) ++steps;
  return steps;
}

// The element `lag` < width steps before step t of its sequence.
template <typename Scalar>
__device__ __forceinline__ Scalar element_before(const ConvParams& p, int64_t b, int64_t t, int64_t c, int64_t lag) {
  const int64_t since = steps_since_first(p, b, t, lag);
  if (since >= lag) return static_cast<const Scalar*>(p.x.data)[p.x.offset(b, t - lag, c)];
  return load_initial<Scalar>(p, b, t - since, c, lag - since);
}

// The state that a sequence leaves at its last step t.
template <typename Scalar>
__device__ __forceinline__ void store_final_state(const ConvParams& p, const StateView& target, int64_t b, int64_t t,
                                                  int64_t c) {
  const int64_t state = p.state_of_last_step(b, t);
  if (state < 0) return;
  for (int64_t i = 0; i < p.width - 1; ++i) {
    static_cast<Scalar*>(target.data)[target.offset(state, c, i)] = element_before<Scalar>(p, b, t, c, p.width - 2 - i);
  }
}

template <typename Acc>
__device__ __forceinline__ Acc silu_derivative(Acc pre) {
  return ssm_kernels::silu_derivative(pre, sigmoid(pre));
}

// What the gradient of a sequence's final state adds to that of the element `after` steps before the sequence's last step t.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_grad_final(const ConvBwdParams& p, int64_t b, int64_t t, int64_t c,
                                                                  int64_t after) {
  const int64_t index = p.width - 2 - after;
  const int64_t state = p.grad_final_state.data == nullptr || index < 0 ? -1 : p.state_of_last_step(b, t);
  if (state < 0) return 0;
  return to_accumulate(static_cast<const Scalar*>(p.grad_final_state.data)[p.grad_final_state.offset(state, c, index)]);
}

}  // namespace ssm_kernels::causal_conv1d
