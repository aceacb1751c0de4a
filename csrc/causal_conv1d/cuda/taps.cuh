// The convolution's parameters in registers, its sums over taps, and the activation's derivative, for all of its kernels.
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

template <typename Acc>
__device__ __forceinline__ Acc silu_derivative(Acc pre) {
  return ssm_kernels::silu_derivative(pre, sigmoid(pre));
}

}  // namespace ssm_kernels::causal_conv1d
