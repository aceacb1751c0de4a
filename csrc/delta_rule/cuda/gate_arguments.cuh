// The arguments g and beta as the delta rule's kernels read them, their gates, and the gradients of raw gates.
#pragma once

#include <type_traits>

#include "common/delta_gates.h"
#include "cuda/vector_io.cuh"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// An argument with rows of one element, of the inputs' type or fp32.
template <typename Scalar>
__device__ __forceinline__ float argument_at(const RowsView& view, bool is_fp32, int64_t batch, int64_t step, int64_t head) {
  const int64_t offset = batch * view.stride_batch + step * view.stride_step + head * view.stride_head;
  return is_fp32 ? static_cast<const float*>(view.data)[offset]
                 : cuda::to_accumulate(static_cast<const Scalar*>(view.data)[offset]);
}
__device__ __forceinline__ float& fp32_at(const RowsView& view, int64_t batch, int64_t step, int64_t head) {
  return static_cast<float*>(view.data)[batch * view.stride_batch + step * view.stride_step + head * view.stride_head];
}

template <typename Scalar>
__device__ __forceinline__ void put_argument(const RowsView& view, bool is_fp32, int64_t batch, int64_t step, int64_t head,
                                             float value) {
  if (view.data == nullptr) return;
  if (is_fp32) {
    fp32_at(view, batch, step, head) = value;
  } else {
    static_cast<Scalar*>(view.data)[batch * view.stride_batch + step * view.stride_step + head * view.stride_head] =
        cuda::from_accumulate<Scalar>(value);
  }
}

// The parameters of a raw gate. dt_bias has `channels` elements a head.
struct GateOfHead {
  float rate, bias;

  __device__ __forceinline__ GateOfHead(const DeltaRuleGateOptions& options, int64_t head, int channel = 0, int channels = 1)
      : rate(options.A_log == nullptr ? 1.0f : expf(options.A_log[head])),
        bias(options.dt_bias == nullptr ? 0.0f : options.dt_bias[head * channels + channel]) {}

  template <bool is_bounded>
  __device__ __forceinline__ float log_decay(const DeltaRuleGateOptions& options, float raw) const {
    return is_bounded ? bounded_gate(raw + bias, rate, options.gate_lower_bound) : softplus_gate(raw + bias, rate);
  }
};

// Calls body with options.is_bounded as a constant, so that a loop over gates has no branches.
template <typename Body>
__device__ __forceinline__ void visit_gate(const DeltaRuleGateOptions& options, const Body& body) {
  if (options.is_bounded) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

// The gradient of a log decay's raw gate, and of A_log. A log decay with the gradient zero has none, even where it is minus
// infinity.
struct RawGateGrad {
  float raw, A_log;

  template <bool is_bounded>
  static __device__ __forceinline__ RawGateGrad of(const DeltaRuleGateOptions& options, const GateOfHead& gate, float argument,
                                                   float grad) {
    const float biased = argument + gate.bias;
    RawGateGrad result;
    if constexpr (is_bounded) {
      const float bounded = sigmoid(gate.rate * biased);
      result.raw = gate.rate * (grad * options.gate_lower_bound * bounded * (1.0f - bounded));
      result.A_log = result.raw * biased;
    } else {
      const float of_softplus = -grad * gate.rate;
      result.raw = of_softplus * softplus_derivative(biased);
      result.A_log = of_softplus * softplus(biased);
    }
    return grad == 0.0f ? RawGateGrad{grad, 0} : result;
  }
};

}  // namespace ssm_kernels::delta_rule
