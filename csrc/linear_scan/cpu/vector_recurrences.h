// Formulas of recurrences for SIMD vectors, where those of common/recurrences.h take more operations than needed: a division of
// vectors takes as long as twenty other operations, but on CUDA a reciprocal is one instruction.
//
// Included only by cpu/*kernel.cpp files, which are compiled once per instruction set.
#pragma once

#include <type_traits>

#include "common/recurrences.h"
#include "cpu/vec_math.h"

namespace ssm_kernels {
inline namespace CPU_CAPABILITY {

// prepare(x, prepared) computes functions of the last input alone, kPrepared of them, which the formulas read in its place.
// Kernels call it once for an input that is the same at all steps.
template <typename Variant>
struct OnVectors : Variant {
  static constexpr size_t kPrepared = 0;
};

// With d = 1 + e^-logit and r = 1 / (d_f + d_i) the normalized gates are r d_i and r d_f, and the derivative of the second by a
// logit is, up to its sign, r d_f r d_i e^-logit / d: without a second division, as e^-logit cancels one of the factors d.
// Both exponentials are scaled down as in normalized_gates().
template <typename Options>
struct OnVectors<MinLstmVariant<Options>> : MinLstmVariant<Options> {
  using Options::candidate_activation;
  static constexpr size_t kPrepared = 0;

  template <typename V>
  struct Gates {
    typename Math<V>::Exponential forget, input;
    V r;
    V input_gate;
  };

  template <typename V>
  static inline __attribute__((always_inline)) Gates<V> gates(const V* x) {
    using Scalar = typename Math<V>::Scalar;
    constexpr bool is_double = std::is_same_v<Scalar, double>;
    constexpr Scalar kLarge = is_double ? 40 : 17, kLargest = is_double ? 700 : 80;
    const V shift = Math<V>::min(Math<V>::max(x[0], x[1]) + V(kLarge), V(Scalar(0)));
    Gates<V> gates;
    gates.forget = Math<V>::exp_negative(x[0] - shift, -kLargest);
    gates.input = Math<V>::exp_negative(x[1] - shift, -kLargest);
    gates.r = Math<V>::reciprocal(gates.forget.plus_one + gates.input.plus_one);
    gates.input_gate = gates.forget.plus_one * gates.r;
    return gates;
  }

  template <typename V>
  inline __attribute__((always_inline)) Step<V> step(const Gates<V>& gates, const V* x) const {
    return interpolate(gates.input_gate, activate(candidate_activation(), x[2]).value);
  }

  template <typename V>
  inline __attribute__((always_inline)) void gradients(const Gates<V>& gates, const V* x, V h, V g, V* grad) const {
    const Activated<V> candidate = activate(candidate_activation(), x[2]);
    const V grad_gate = g * (candidate.value - h);
    grad[0] = negate(grad_gate * (gates.input.plus_one * gates.r)) * (gates.forget.value * gates.r);
    grad[1] = grad_gate * gates.input_gate * (gates.input.value * gates.r);
    grad[2] = g * gates.input_gate * candidate.derivative;
  }
};

// The rate and the slope of softplus are functions of the parameter alone, which is usually the same at all steps. The formulas
// are those of RgLru.
template <>
struct OnVectors<RgLru> : RgLru {
  static constexpr size_t kPrepared = 2;

  template <typename V>
  static void prepare(V recurrent_param, V* prepared) {
    prepared[0] = V(typename Math<V>::Scalar(-8)) * softplus(recurrent_param);
    prepared[1] = softplus_derivative(recurrent_param);
  }

  template <typename V>
  struct Gates {
    V gate, input_gate, a, norm;
  };

  template <typename V>
  static inline __attribute__((always_inline)) Gates<V> gates(const V* x) {
    using Scalar = typename Math<V>::Scalar;
    const V gate = sigmoid(x[0]), log_a = x[3] * gate, a_minus_one = Math<V>::expm1(log_a);
    // Near one, where a state lasts long, a is as exact as its rounding.
    const auto is_near_one = Math<V>::less(V(Scalar(-0.5)), log_a);
    const V a = Math<V>::select(is_near_one, one<V>() + a_minus_one, Math<V>::exp(log_a));
    return {gate, sigmoid(x[1]), a, Math<V>::sqrt(negate(a_minus_one) * (a_minus_one + V(Scalar(2))))};
  }

  template <typename V>
  static inline __attribute__((always_inline)) Step<V> step(const Gates<V>& gates, const V* x) {
    return {gates.a, gates.norm * gates.input_gate * x[2]};
  }

  template <typename V>
  static inline __attribute__((always_inline)) void gradients(const Gates<V>& gates, const V* x, V h, V g, V* grad) {
    using Scalar = typename Math<V>::Scalar;
    const V input = gates.input_gate * x[2];
    // Bounds as in RgLru::gradients.
    constexpr Scalar kMinNorm = std::is_same_v<Scalar, double> ? Scalar(1e-150) : Scalar(1e-18f);
    const V slope = negate(gates.a) * Math<V>::reciprocal(Math<V>::max(gates.norm, V(kMinNorm)));
    const V grad_log_a = g * gates.a * Math<V>::fma(input, slope, h);
    const V rate = Math<V>::max(x[3], V(-kLargestRate<Scalar>));
    grad[0] = grad_log_a * rate * (gates.gate * (one<V>() - gates.gate));
    grad[1] = g * gates.norm * input * (one<V>() - gates.input_gate);
    grad[2] = g * gates.norm * gates.input_gate;
    grad[3] = grad_log_a * V(Scalar(-8)) * gates.gate * x[4];
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels
