// The methods of common/separate_step.h that read one sample, in the forms that CUDA kernels compute:
//
//   h_t = e^{delta_A_t A} h_{t-1} + input_t k(delta_t A) B_t,  input_t = delta_t u_t, or u_t of dirac
//
// Kernels keep delta_A where they keep delta for other methods, so that maps of the state and their scans are the same. The
// factor k is that of an own step, delta; zoh and dirac have none. In backward, with g the gradient of h_t:
//
//   grad_delta_A = A sum_n g e^{delta_A A} h_{t-1}
//   grad_delta   = u sum_n g B (z k)'                                        z = delta A
//   grad_A       = delta_A g e^{delta_A A} h_{t-1} + delta^2 k' g B u
#pragma once

#include "common/separate_step.h"

namespace ssm_kernels::selective_scan {

// k, k' and (z k)' at an own step.
template <typename T>
struct OwnGain {
  T gain, derivative, z_gain;
};

struct SeparateUnitForm : Zoh {
  static constexpr bool kSeparate = true;
};

struct SeparateExactForm : ZohExact {
  static constexpr bool kSeparate = true;
  // `exponent` is delta A log2(e).
  template <typename T>
  SSM_HOST_DEVICE T own_gain(T exponent) const {
    return phi1(exponent * T(kLn2), Math<T>::exp2(exponent));
  }
  template <typename T>
  SSM_HOST_DEVICE OwnGain<T> own(T exponent) const {
    const T z = exponent * T(kLn2), ez = Math<T>::exp2(exponent), gain = phi1(z, ez);
    return {gain, phi1_derivative(z, ez, gain), ez};
  }
};

// k = 1 + z (1/2 + z (third + z fourth)): `third` is 1/6 of poly and rk4, `fourth` 1/24 of rk4, and else they are zero.
struct SeparateTaylorForm : ExponentialTransition {
  static constexpr bool kSeparate = true, kUnitGain = false;
  double third = 0, fourth = 0;

  SSM_HOST_DEVICE explicit SeparateTaylorForm(Discretization method)
      : third(method == Discretization::kHighOrder ? 0.0 : 1.0 / 6), fourth(method == Discretization::kRk4 ? 1.0 / 24 : 0.0) {}
  template <typename T>
  SSM_HOST_DEVICE T own_gain(T exponent) const {
    const T z = exponent * T(kLn2);
    return Math<T>::fma(z, Math<T>::fma(z, Math<T>::fma(z, T(fourth), T(third)), T(0.5)), T(1));
  }
  template <typename T>
  SSM_HOST_DEVICE OwnGain<T> own(T exponent) const {
    const T z = exponent * T(kLn2), c = T(third), d = T(fourth);
    return {own_gain(exponent), Math<T>::fma(z, Math<T>::fma(z, T(3) * d, T(2) * c), T(0.5)),
            Math<T>::fma(z, Math<T>::fma(z, Math<T>::fma(z, T(4) * d, T(3) * c), T(1)), T(1))};
  }
};

// Calls visit(SeparateUnitForm{}), ...: turns the run-time method into a type.
template <typename Visitor>
SSM_HOST_DEVICE void visit_separate_form(Discretization method, const Visitor& visit) {
  if (method == Discretization::kZoh || method == Discretization::kDirac) {
    visit(SeparateUnitForm());
  } else if (method == Discretization::kZohExact) {
    visit(SeparateExactForm());
  } else {
    visit(SeparateTaylorForm(method));
  }
}

}  // namespace ssm_kernels::selective_scan
