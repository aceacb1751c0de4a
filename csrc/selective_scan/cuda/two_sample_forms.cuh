// The methods of common/two_sample_discretization.h in the form that CUDA kernels compute:
//
//   h_t = Abar(z) h_{t-1} + current(z) a_t B_t + previous(z) w_t B_{t-1}
//   a_t = delta_t lam_t u_t,  w_t = delta_t (1 - lam_t) u_{t-1}
//
// The weight lam is alpha for the bilinear rules, and 1/2 for the trapezoidal one; the true first-order hold has a_t = delta_t
// u_t and w_t = delta_t u_{t-1}. Neither a nor w depends on the state. Where the factors `current` and `previous` are equal, or
// `previous` is Abar, one multiply-add a state and step is all that the second sample costs.
//
// In backward, with g the gradient of h_t:
//
//   grad_z         = g (Abar' h_{t-1} + current' a_t B_t + previous' w_t B_{t-1})
//   grad_(delta lam)       = u_t     sum_n B_t     g current
//   grad_(delta (1 - lam)) = u_{t-1} sum_n B_{t-1} g previous
//
// and the gradients of u_{t-1} and B_{t-1} get terms of step t.
#pragma once

#include "common/two_sample_discretization.h"

namespace ssm_kernels::selective_scan {

template <typename T>
struct SampleFactors {
  T current, previous;
};
template <typename T>
struct SampleDerivatives {
  T abar, current, previous;
};

struct RampForm {
  static constexpr bool kExponential = true, kUnitGain = false, kInputHasDelta = true, kUsesPreviousInput = true;
  static constexpr bool kHasLam = false, kIsWeighted = false;
  template <typename T>
  SSM_HOST_DEVICE static T basis(T z) {
    return Math<T>::exp(z);
  }
  template <typename T>
  SSM_HOST_DEVICE static T abar(T, T ez) {
    return ez;
  }
  template <typename T>
  SSM_HOST_DEVICE static SampleFactors<T> factors(T z, T ez) {
    const Coefficients<T> gain = FohRamp().gain(z, ez);
    return {gain.current, gain.previous};
  }
  template <typename T>
  SSM_HOST_DEVICE static SampleDerivatives<T> derivatives(T z, T ez) {
    const TwoSampleDerivatives<T> derivatives = FohRamp().derivatives(z, ez);
    return {derivatives.abar, derivatives.gain, derivatives.previous};
  }
};

// Also the trapezoidal rule, with alpha = 1/2.
struct GbtForm : Gbt {
  static constexpr bool kUsesPreviousInput = true, kHasLam = false, kIsWeighted = true;
  using Gbt::Gbt;
  template <typename T>
  SSM_HOST_DEVICE static SampleFactors<T> factors(T, T r) {
    return {r, r};
  }
  template <typename T>
  SSM_HOST_DEVICE SampleDerivatives<T> derivatives(T, T r) const {
    const T r2 = r * r, of_r = T(this->template value<T>()) * r2;
    return {r2, of_r, of_r};
  }
  template <typename T>
  SSM_HOST_DEVICE typename Math<T>::Scalar weight() const {
    return this->template value<T>();
  }
};

struct ExpTrapezoidalForm : ExponentialTransition {
  static constexpr bool kUnitGain = false, kUsesPreviousInput = true, kHasLam = true, kIsWeighted = true;
  template <typename T>
  SSM_HOST_DEVICE static SampleFactors<T> factors(T, T ez) {
    return {T(typename Math<T>::Scalar(1)), ez};
  }
  template <typename T>
  SSM_HOST_DEVICE static SampleDerivatives<T> derivatives(T, T ez) {
    return {ez, T(typename Math<T>::Scalar(0)), ez};
  }
};

// Calls visit(RampForm{}), ...: turns the run-time method, one of the third table, into a type.
template <typename Visitor>
SSM_HOST_DEVICE void visit_two_sample_form(Discretization method, const MethodParameters& parameters, const Visitor& visit) {
  if (method == Discretization::kFohRamp) {
    visit(RampForm());
  } else if (method == Discretization::kExpTrapezoidal) {
    visit(ExpTrapezoidalForm());
  } else {
    visit(GbtForm(method == Discretization::kTrapezoidal ? 0.5 : parameters.alpha));
  }
}

}  // namespace ssm_kernels::selective_scan
