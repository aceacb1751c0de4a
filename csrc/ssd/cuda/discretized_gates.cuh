// The gates of SSD (cuda/chunked/gates.cuh), from dt, A and the discretization: with the step size d, which is dt with bias,
// softplus and limits, the log decay is zeta = d A and the gain c = d k(zeta).
#pragma once

#include "common/activations.h"
#include "common/limits.h"
#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/lane_sums.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

// Calls visitor with the discretization as a type.
template <typename Visitor>
__device__ __forceinline__ void visit_exponential(Discretization discretization, const Visitor& visitor) {
  switch (discretization) {
#define SSM_ROW(enumerator, name, type)                \
  case Discretization::enumerator:                     \
    if constexpr (type::kExponential) visitor(type()); \
    break;
    SSM_BASIC_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW
    default:
      break;
  }
}

template <typename Scalar_>
struct DiscretizedGates {
  using Scalar = Scalar_;
  using FwdParams = SsdFwdParams;
  using BwdParams = SsdBwdParams;
  using Loaded = Scalar;         // dt
  using Source = const Scalar*;  // of dt
  using Kept = float;            // dt

  float A, dt_bias;

  DiscretizedGates() = default;
  __device__ __forceinline__ DiscretizedGates(const SsdParams& p, int64_t head)
      : A(p.A[head]), dt_bias(p.dt_bias != nullptr ? p.dt_bias[head] : 0.0f) {}

  static __device__ __forceinline__ Source source(const SsdParams& p, const ChunkSpan& span, int64_t head, int chunk) {
    return span.rows<const Scalar>(p.dt, head, chunk);
  }
  static __device__ __forceinline__ Source later(const SsdParams& p, Source source, int chunks) {
    return source + first_step(chunks) * p.dt.stride_step;
  }
  static __device__ __forceinline__ void load(const SsdParams& p, Source source, int step, Loaded& loaded) {
    loaded = source[step * p.dt.stride_step];
  }

  static __device__ __forceinline__ Kept keep(const SsdParams&, Loaded dt) { return cuda::to_accumulate(dt); }

  // The step size d. scale_gains() multiplies by k.
  __device__ __forceinline__ float gain(const SsdParams& p, float dt) const {
    return clamp(before_limits(p, dt), p.dt_min, p.dt_max);
  }
  template <typename Sum>
  __device__ __forceinline__ Sum log_decay(float, float d) const {
    return Sum(d) * Sum(A);
  }
  template <int count>
  __device__ __forceinline__ void scale_gains(const SsdParams& p, const float (&zeta)[count][2],
                                              float (&gain)[count][2]) const {
    visit_exponential(p.discretization, [&](auto method) {
      using Method = decltype(method);
      if constexpr (!Method::kUnitGain) {
        for_each_step<count>(
            [&](int k, int i) { gain[k][i] *= current_gain(Method(), zeta[k][i], Method::basis(zeta[k][i])); });
      }
    });
  }

  // Writes the gradient of dt, and the chunk's part of the gradients of A and dt_bias.
  __device__ __forceinline__ void write_gradients(const SsdBwdParams& p, const ChunkSpan& span, int steps, int64_t chunk,
                                                  int64_t head, const Kept (&kept)[kChunk], const FragmentLane& lane,
                                                  const GateGradients& gradients) const {
    // From this rate on every state has decayed to zero: the gradient through the decay is zero, not A times a rounding error.
    const bool has_decayed = !(fabsf(A) < kLargestRate<float>);
    float grad_A = 0, grad_bias = 0;
    Scalar* const target = span.rows<Scalar>(p.grad_dt, head, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * lane.index + i;
      const float dt = kept[step], unlimited = before_limits(p, dt), d = gain(p, dt);
      const float zeta = d * A;
      // c = d k(d A): its derivative by d is (z k)', by A it is d^2 k'.
      float by_size = 0, by_A = 0;
      visit_exponential(p.discretization, [&](auto method) {
        using Method = decltype(method);
        const float basis = Method::basis(zeta);
        const auto derivatives = Method::derivatives(zeta, basis, current_gain(Method(), zeta, basis));
        by_size = gradients.gain[i] * derivatives.z_gain;
        if (!has_decayed) by_size = fmaf(gradients.log_decay[i], A, by_size);
        by_A = fmaf(gradients.gain[i] * d, derivatives.gain, gradients.log_decay[i]) * d;
      });
      float grad = unlimited < p.dt_min || unlimited > p.dt_max ? 0.0f : by_size;
      if (p.dt_softplus) grad *= softplus_derivative(dt + dt_bias);
      if (step < steps) {
        grad_A += by_A;
        grad_bias += grad;
        if (p.grad_dt.data != nullptr) target[step * p.grad_dt.stride_step] = cuda::from_accumulate<Scalar>(grad);
      }
    }
    grad_A = cuda::sum_over_warp(grad_A);
    grad_bias = cuda::sum_over_warp(grad_bias);
    if (lane.index == 0) {
      p.grad_A_parts[chunk * p.parts_heads + head] = grad_A;
      p.grad_bias_parts[chunk * p.parts_heads + head] = grad_bias;
    }
  }

  static __device__ __forceinline__ void clear_gradients(const SsdBwdParams& p, int64_t chunk, int64_t head) {
    const int64_t part = chunk * p.parts_heads + head;
    p.grad_A_parts[part] = p.grad_bias_parts[part] = 0;
  }

 private:
  __device__ __forceinline__ float before_limits(const SsdParams& p, float dt) const {
    const float biased = dt + dt_bias;
    return p.dt_softplus ? softplus(biased) : biased;
  }
};

}  // namespace ssm_kernels::ssd
