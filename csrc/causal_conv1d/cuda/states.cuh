// The elements around a sequence's ends: inputs before a step, from x or the initial state, the final state, and its gradient.
#pragma once

#include "causal_conv1d/cuda/launch.h"
#include "cuda/vector_io.cuh"

namespace ssm_kernels::causal_conv1d {

using cuda::AccumulateType;
using cuda::from_accumulate;
using cuda::to_accumulate;

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
