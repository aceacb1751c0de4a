// Discretizations that read two input samples a step. With z = delta A and v = B u,
//
//   h_t = Abar(z) h_{t-1} + delta (k(z) v_t + m(z) v_{t-1})
//
// A method is a struct, as those of common/discretization.h. `gain` returns {k, m}, `derivatives` Abar', k', m', (z k)' and
// (z m)', with which no gradient divides by A, z or Abar:
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

// (phi2(z) - 1/2) / z, given p2 = phi2(z).
template <typename T>
SSM_HOST_DEVICE T phi3(T z, T p2) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 20 : 12;
  const T one(Scalar(1)), border(Scalar(1.5));
  const auto near_zero = Math<T>::less(Math<T>::abs(z), border);
  const T away = Math<T>::select(near_zero, one, z);
  return Math<T>::select(near_zero, phi_series<3, kTerms>(z), (p2 - T(Scalar(0.5))) * Math<T>::reciprocal(away));
}

// True first-order hold: exact for an input that is linear over the step.
struct FohRamp {
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
    const T p1 = phi1(z, ez), p2 = phi2(z, p1);
    return {p2, p1 - p2};
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T z, T ez) const {
    const T p1 = phi1(z, ez), p2 = phi2(z, p1), twice_p3 = phi3(z, p2) + phi3(z, p2);
    return {ez, p2 - twice_p3, p1 - p2 - p2 + twice_p3, p1 - p2, ez - p1 + p2};
  }
};

// The generalized bilinear transform of both the state and the input. alpha = 1/2 is the trapezoidal rule.
struct GbtTwoSample : Gbt {
  static constexpr bool kUsesPreviousInput = true;
  using Gbt::Gbt;
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T, T r) const {
    using Scalar = typename Math<T>::Scalar;
    return {T(Scalar(alpha)) * r, T(Scalar(1 - alpha)) * r};
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T, T r) const {
    using Scalar = typename Math<T>::Scalar;
    const T r2 = r * r, current(Scalar{static_cast<Scalar>(alpha)}), previous(Scalar{static_cast<Scalar>(1 - alpha)});
    return {r2, current * current * r2, current * previous * r2, current * r2, previous * r2};
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

}  // namespace ssm_kernels
