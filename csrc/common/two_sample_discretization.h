// Discretizations that read two input samples a step. With z = delta A and v = B u,
//
//   h_t = Abar(z) h_{t-1} + delta (k(z) v_t + m(z) v_{t-1})
//
// A rule is a struct, as the methods of common/discretization.h. `step(lam)` is its method at a step, with the same functions:
// `gain` returns {k, m}, `derivatives` Abar', k', m', (z k)' and (z m)', with which no gradient divides by A, z or Abar.
// kHasLam: a step has a weight lam.
//
//   d h / d delta = A Abar' h_{t-1} + (z k)' v_t + (z m)' v_{t-1}
//   d h / d A     = delta (Abar' h_{t-1} + delta (k' v_t + m' v_{t-1}))
//
// In backward, with g the gradient of h_t, the gradient of v_t is delta_t k_t g_t + delta_{t+1} m_{t+1} g_{t+1}: the second
// term is carried from step t + 1 to step t as the adjoint Abar_{t+1} g_{t+1} is.
#pragma once

#include "common/discretization.h"
#include "common/math.h"
#include "common/phi.h"

namespace ssm_kernels {

template <typename T>
struct TwoSampleDerivatives {
  T abar, gain, previous, z_gain, z_previous;
};

// A rule whose steps have no weight is its own method at every step.
template <typename Rule>
struct WithoutLam {
  static constexpr bool kHasLam = false;
  template <typename T>
  SSM_HOST_DEVICE const Rule& step(T) const {
    return static_cast<const Rule&>(*this);
  }
};

// (phi1(z) - 1) / z, given p1 = phi1(z).
template <typename T>
SSM_HOST_DEVICE T phi2(T z, T p1) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 18 : 10;
  const T one(Scalar(1));
  const auto near_zero = Math<T>::less(Math<T>::abs(z), one);
  const T away = Math<T>::select(near_zero, one, z);
  return Math<T>::select(near_zero, phi_series<2, kTerms>(z), (p1 - one) * Math<T>::reciprocal(away));
}

// phi2'(z) = phi2 - 2 phi3 = (phi1 - 2 phi2) / z, given p1 = phi1(z) and p2 = phi2(z). The difference cancels far from zero,
// the quotient near zero.
template <typename T>
SSM_HOST_DEVICE T phi2_derivative(T z, T p1, T p2) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 20 : 12;
  const T one(Scalar(1)), border(Scalar(1.5));
  const auto near_zero = Math<T>::less(Math<T>::abs(z), border);
  const T away = Math<T>::select(near_zero, one, z), p3 = phi_series<3, kTerms>(z);
  return Math<T>::select(near_zero, p2 - p3 - p3, (p1 - p2 - p2) * Math<T>::reciprocal(away));
}

// phi1''(z) = phi1' - phi2' = (e^z - 2 phi1') / z, given ez = e^z, d1 = phi1'(z) and d2 = phi2'(z), as above.
template <typename T>
SSM_HOST_DEVICE T phi1_second_derivative(T z, T ez, T d1, T d2) {
  using Scalar = typename Math<T>::Scalar;
  const T one(Scalar(1)), border(Scalar(1.5));
  const auto near_zero = Math<T>::less(Math<T>::abs(z), border);
  const T away = Math<T>::select(near_zero, one, z);
  return Math<T>::select(near_zero, d1 - d2, (ez - d1 - d1) * Math<T>::reciprocal(away));
}

// True first-order hold: exact for an input that is linear over the step. k = phi2 and m = phi1 - phi2 = phi1', so that
// (z k)' = phi1' and (z m)' = (e^z - phi1)' = e^z - phi1'.
struct FohRamp : WithoutLam<FohRamp> {
  static constexpr bool kExponential = true, kInputHasDelta = true, kUsesPreviousInput = true, kUnitGain = false;
  template <typename T>
  SSM_HOST_DEVICE T basis(T z) const {
    return Math<T>::exp(z);
  }
  template <typename T>
  SSM_HOST_DEVICE T abar(T, T ez) const {
    return ez;
  }
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T z, T ez) const {
    const T p1 = phi1(z, ez);
    return {phi2(z, p1), phi1_derivative(z, ez, p1)};
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T z, T ez) const {
    const T p1 = phi1(z, ez), d1 = phi1_derivative(z, ez, p1), d2 = phi2_derivative(z, p1, phi2(z, p1));
    return {ez, d2, phi1_second_derivative(z, ez, d1, d2), d1, ez - d1};
  }
};

// The generalized bilinear transform of both the state and the input, with alpha, from 0 to 1, as a parameter of the call.
struct GbtTwoSample : Gbt, WithoutLam<GbtTwoSample> {
  static constexpr bool kUsesPreviousInput = true;
  using Gbt::Gbt;
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T, T r) const {
    return {T(value<T>()) * r, T(rest<T>()) * r};
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T, T r) const {
    const T r2 = r * r, current = T(value<T>()) * r2, previous = T(rest<T>()) * r2;
    return {r2, T(value<T>()) * current, T(value<T>()) * previous, current, previous};
  }

 private:
  template <typename T>
  SSM_HOST_DEVICE typename Math<T>::Scalar rest() const {
    return typename Math<T>::Scalar(1) - value<T>();
  }
};

// The same with alpha = 1/2.
struct Trapezoidal : Bilinear, WithoutLam<Trapezoidal> {
  static constexpr bool kUsesPreviousInput = true;
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T, T r) const {
    const T half = T(typename Math<T>::Scalar(0.5)) * r;
    return {half, half};
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T, T r) const {
    const T half(typename Math<T>::Scalar(0.5)), r2 = r * r, half_r2 = half * r2, quarter_r2 = half * half_r2;
    return {r2, quarter_r2, quarter_r2, half_r2, half_r2};
  }
};

// Mamba-3's rule: the exact decay, and the two samples weighed by lam and 1 - lam. lam belongs to the step; its gradient is
// delta g (v_t - e^z v_{t-1}), summed over the states.
template <typename T>
struct ExpTrapezoidal {
  static constexpr bool kExponential = true, kInputHasDelta = true, kUsesPreviousInput = true, kUnitGain = false;
  T lam;

  SSM_HOST_DEVICE T basis(T z) const { return Math<T>::exp(z); }
  SSM_HOST_DEVICE T abar(T, T ez) const { return ez; }
  SSM_HOST_DEVICE Coefficients<T> gain(T, T ez) const { return {lam, (one() - lam) * ez}; }
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T z, T ez) const {
    const T previous = (one() - lam) * ez;
    return {ez, T(typename Math<T>::Scalar(0)), previous, lam, Math<T>::fma(z, previous, previous)};
  }

 private:
  SSM_HOST_DEVICE static T one() { return T(typename Math<T>::Scalar(1)); }
};
struct ExpTrapezoidalRule {
  static constexpr bool kHasLam = true;
  template <typename T>
  SSM_HOST_DEVICE ExpTrapezoidal<T> step(T lam) const {
    return {lam};
  }
};

// Calls visitor(FohRamp{}), visitor(Trapezoidal{}), ...
SSM_DEFINE_DISCRETIZATION_VISITOR(visit_two_sample_discretization, SSM_TWO_SAMPLE_DISCRETIZATIONS,
                                  static_cast<int>(std::size(kDiscretizationTable)))

}  // namespace ssm_kernels
