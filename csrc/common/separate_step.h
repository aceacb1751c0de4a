// Discretizations with a step of its own for A: with v = B u, z = delta A and s = delta_A A,
//
//   h_t = e^{s_t} h_{t-1} + delta_t (k(z_t) v_t + m(s_t) v_{t-1})
//
// The state decays over delta_A, the time since the step before, and an input acts for delta. These are the methods with
// Abar = e^z whose input has no part in the decay between samples: zoh, zoh_exact, its Taylor polynomials, dirac, whose input
// has no delta, and exp_trapezoidal, whose previous sample decays with the state.
//
// SeparateStep<Rule> has the functions of the rules of two_sample_discretization.h. `basis` and `abar` take s, `gain` takes z
// and the basis of s, and so does `derivatives`, which has {e^s, k'(z), m'(s), (z k)', m}:
//
//   d h / d delta   = (z k)' v_t + m v_{t-1}
//   d h / d delta_A = A (e^s h_{t-1} + delta m' v_{t-1})
//   d h / d A       = delta_A (e^s h_{t-1} + delta m' v_{t-1}) + delta^2 k' v_t
#pragma once

#include "common/two_sample_discretization.h"

namespace ssm_kernels {

// Whether a method with Abar = e^z has a meaning with two steps: foh_ramp joins the two samples of one step by a line.
inline bool takes_delta_A(Discretization method) {
  switch (method) {
    case Discretization::kZoh:
    case Discretization::kZohExact:
    case Discretization::kPoly:
    case Discretization::kHighOrder:
    case Discretization::kRk4:
    case Discretization::kDirac:
    case Discretization::kExpTrapezoidal:
      return true;
    default:
      return false;
  }
}

// A method that reads one sample, at a step.
template <typename Method>
struct SeparateStep : WithoutLam<SeparateStep<Method>> {
  static_assert(Method::kExponential && !Method::kUsesPreviousInput);
  static constexpr bool kSeparate = true, kExponential = true, kUsesPreviousInput = false;
  static constexpr bool kInputHasDelta = Method::kInputHasDelta, kUnitGain = Method::kUnitGain;

  template <typename T>
  SSM_HOST_DEVICE T basis(T s) const {
    return Math<T>::exp(s);
  }
  template <typename T>
  SSM_HOST_DEVICE T abar(T, T basis) const {
    return basis;
  }
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T z, T) const {
    return Method::gain(z, own_basis(z));
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T z, T basis) const {
    const T zero(typename Math<T>::Scalar(0)), own = own_basis(z);
    const auto derivative = Method::derivatives(z, own, Method::gain(z, own).current);
    return {basis, derivative.gain, zero, derivative.z_gain, zero};
  }

 private:
  // The exponential of the gain, which one method has.
  template <typename T>
  static SSM_HOST_DEVICE T own_basis(T z) {
    if constexpr (std::is_same_v<Method, ZohExact>) return Method::basis(z);
    return T(typename Math<T>::Scalar(0));
  }
};

template <typename T>
struct SeparateExpTrapezoidal : ExpTrapezoidal<T> {
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T z, T basis) const {
    TwoSampleDerivatives<T> result = ExpTrapezoidal<T>::derivatives(z, basis);
    result.z_previous = result.previous;
    return result;
  }
};
template <>
struct SeparateStep<ExpTrapezoidalRule> {
  static constexpr bool kHasLam = true, kSeparate = true, kUsesPreviousInput = true;
  template <typename T>
  SSM_HOST_DEVICE SeparateExpTrapezoidal<T> step(T lam) const {
    return {{lam}};
  }
};

template <typename Rule, typename = void>
constexpr bool kHasSeparateStep = false;
template <typename Rule>
constexpr bool kHasSeparateStep<Rule, std::void_t<decltype(Rule::kSeparate)>> = Rule::kSeparate;

// Calls visitor(SeparateStep<Zoh>{}), ...: turns the run-time method, one with takes_delta_A(), into a type. The visitor may be
// host or device code.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Visitor>
SSM_HOST_DEVICE void visit_separate_step(Discretization method, Visitor&& visitor) {
  switch (method) {
    case Discretization::kZoh:
      return visitor(SeparateStep<Zoh>{});
    case Discretization::kZohExact:
      return visitor(SeparateStep<ZohExact>{});
    case Discretization::kPoly:
      return visitor(SeparateStep<Poly>{});
    case Discretization::kHighOrder:
      return visitor(SeparateStep<HighOrder>{});
    case Discretization::kRk4:
      return visitor(SeparateStep<Rk4>{});
    case Discretization::kDirac:
      return visitor(SeparateStep<Dirac>{});
    case Discretization::kExpTrapezoidal:
      return visitor(SeparateStep<ExpTrapezoidalRule>{});
    default:
      break;
  }
  SSM_UNKNOWN_ENUMERATOR("a discretization that takes delta_A", static_cast<int>(std::size(kDiscretizationTable)), method);
}

}  // namespace ssm_kernels
