// The causal convolution for any strides, widths and dtypes: one thread per element. causal_conv1d.h has the formulas.
//
// Forward: thread (b, t, c) adds the taps of its element. Backward takes three kernels:
//
//   conv_bwd_pre_general_kernel   g_t = grad_out_t act'(pre_t), kept in the workspace
//   conv_bwd_x_general_kernel     grad_x_t = sum_l w_l g_{t+l}, over the steps of t's sequence
//   conv_bwd_sums_general_kernel  sum_t g_t x_{t-l} per tile of time, lag and channel
//
// Neighboring threads take neighboring channels, or neighboring steps if those are contiguous; taps come from the L1 cache.
//
// conv_bwd_initial_kernel computes the gradient of the initial states for every set of kernels. It depends on the first
// width - 1 steps of a sequence only, whose g it recomputes.
#pragma once

#include "causal_conv1d/cuda/states.cuh"
#include "causal_conv1d/cuda/taps.cuh"

namespace ssm_kernels::causal_conv1d {

constexpr int kGeneralThreads = 256;

// A thread's element: step t of channel c of entry b. find() returns false if the thread has none.
struct Element {
  int64_t b, t, c;

  __device__ __forceinline__ bool find(const ConvParams& p, int64_t steps) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kGeneralThreads + threadIdx.x;
    const bool has_steps_first = p.x.stride_step == 1 && p.x.stride_channel != 1;
    const int64_t fast = has_steps_first ? steps : p.channels, slow = has_steps_first ? p.channels : steps;
    const int64_t rest = index / fast, first = index - rest * fast;
    b = rest / slow;
    const int64_t second = rest - b * slow;
    t = has_steps_first ? first : second;
    c = has_steps_first ? second : first;
    return b < p.batch;
  }
};

template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> sum_taps(const ConvParams& p, int64_t b, int64_t t, int64_t c) {
  using Acc = AccumulateType<Scalar>;
  Acc sum = load_bias<Scalar>(p, c);
  const int64_t since = steps_since_first(p, b, t, p.width - 1);
  for (int64_t lag = 0; lag < p.width; ++lag) {
    sum = Math<Acc>::fma(load_weight<Scalar>(p, c, lag), to_accumulate(load_element<Scalar>(p, b, t, c, lag, since)), sum);
  }
  return sum;
}

template <typename Scalar>
__global__ void __launch_bounds__(kGeneralThreads) conv_fwd_general_kernel(const ConvFwdParams p) {
  using Acc = AccumulateType<Scalar>;
  Element at;
  if (!at.find(p, p.seqlen)) return;
  const bool is_padding = p.is_padding(at.b, at.t);
  const Acc pre = is_padding ? Acc(0) : sum_taps<Scalar>(p, at.b, at.t, at.c);  // whose SiLU is zero, too
  static_cast<Scalar*>(p.out.data)[p.out.offset(at.b, at.t, at.c)] = from_accumulate<Scalar>(p.has_silu ? silu(pre) : pre);
  if (p.final_state.data != nullptr && p.is_last_step(at.b, at.t)) {
    store_final_state<Scalar>(p, at.b, at.t, at.c, is_padding);
  }
}

// g_t; zero without grad_out and in padding.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> compute_grad_pre(const ConvBwdParams& p, int64_t b, int64_t t, int64_t c) {
  using Acc = AccumulateType<Scalar>;
  if (p.grad_out.data == nullptr || p.is_padding(b, t)) return 0;
  const Acc grad = to_accumulate(static_cast<const Scalar*>(p.grad_out.data)[p.grad_out.offset(b, t, c)]);
  return p.has_silu ? grad * silu_derivative(sum_taps<Scalar>(p, b, t, c)) : grad;
}

// Steps from t to the last of its sequence, at most width - 1.
__device__ __forceinline__ int64_t steps_to_last(const ConvParams& p, int64_t b, int64_t t) {
  int64_t after = 0;
  while (after < p.width - 1 && !p.is_last_step(b, t + after)) ++after;
  return after;
}

template <typename Scalar>
__global__ void __launch_bounds__(kGeneralThreads) conv_bwd_pre_general_kernel(const ConvBwdParams p, SequenceView grad_pre) {
  Element at;
  if (!at.find(p, p.seqlen)) return;
  static_cast<AccumulateType<Scalar>*>(grad_pre.data)[grad_pre.offset(at.b, at.t, at.c)] =
      compute_grad_pre<Scalar>(p, at.b, at.t, at.c);
}

template <typename Scalar>
__global__ void __launch_bounds__(kGeneralThreads) conv_bwd_x_general_kernel(const ConvBwdParams p, SequenceView grad_pre) {
  using Acc = AccumulateType<Scalar>;
  Element at;
  if (!at.find(p, p.seqlen)) return;
  Acc sum = 0;
  if (!p.is_padding(at.b, at.t)) {
    const int64_t after = steps_to_last(p, at.b, at.t);
    if (after < p.width - 1) sum = load_grad_final<Scalar>(p, at.b, at.t + after, at.c, after);
    for (int64_t lag = after; lag >= 0; --lag) {
      const Acc grad = static_cast<const Acc*>(grad_pre.data)[grad_pre.offset(at.b, at.t + lag, at.c)];
      sum = Math<Acc>::fma(load_weight<Scalar>(p, at.c, lag), grad, sum);
    }
  }
  static_cast<Scalar*>(p.grad_x.data)[p.grad_x.offset(at.b, at.t, at.c)] = from_accumulate<Scalar>(sum);
}

// A thread computes one element of the partial sums, (batch, tiles, width + 1, channels): by lag, and last of grad_bias.
template <typename Scalar>
__global__ void __launch_bounds__(kGeneralThreads)
    conv_bwd_sums_general_kernel(const ConvBwdParams p, const Tiling tiling, SequenceView grad_pre,
                                 AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kGeneralThreads + threadIdx.x, rows = p.width + 1;
  const int64_t c = index % p.channels, row = index / p.channels % rows, tile = index / p.channels / rows;
  const int64_t b = tile / tiling.tiles, begin = tile % tiling.tiles * tiling.steps;
  if (b >= p.batch) return;
  const int64_t end = begin + tiling.steps < p.seqlen ? begin + tiling.steps : p.seqlen;
  Acc sum = 0;
  for (int64_t t = begin; t < end; ++t) {
    if (p.is_padding(b, t)) continue;
    const Acc factor =
        row == p.width ? Acc(1) : to_accumulate(load_element<Scalar>(p, b, t, c, row, steps_since_first(p, b, t, row)));
    sum = Math<Acc>::fma(static_cast<const Acc*>(grad_pre.data)[grad_pre.offset(b, t, c)], factor, sum);
  }
  sums[index] = sum;
}

// One thread per channel and per step that may be the first of a sequence.
template <typename Scalar>
__global__ void __launch_bounds__(kGeneralThreads, 1) conv_bwd_initial_kernel(const ConvBwdParams p) {
  using Acc = AccumulateType<Scalar>;
  Element at;
  if (!at.find(p, p.ids.data == nullptr ? 1 : p.seqlen) || !p.is_first_step(at.b, at.t)) return;
  const int64_t state = p.state_of_first_step(at.b, at.t);
  if (state < 0) return;
  const bool is_padding = p.is_padding(at.b, at.t);
  const int64_t after = steps_to_last(p, at.b, at.t);
  for (int64_t missing = 1; missing < p.width; ++missing) {
    Acc sum = 0;
    if (after < p.width - 1 && !is_padding) {
      sum = load_grad_final<Scalar>(p, at.b, at.t + after, at.c, after + missing);
    }
    for (int64_t lag = p.width - 1; lag >= missing && !is_padding; --lag) {
      if (lag - missing > after) continue;
      sum =
          Math<Acc>::fma(load_weight<Scalar>(p, at.c, lag), compute_grad_pre<Scalar>(p, at.b, at.t + lag - missing, at.c), sum);
    }
    static_cast<Scalar*>(p.grad_initial_state.data)[p.grad_initial_state.offset(state, at.c, p.width - 1 - missing)] =
        from_accumulate<Scalar>(sum);
  }
}

}  // namespace ssm_kernels::causal_conv1d
