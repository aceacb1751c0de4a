// phi1(z) = (e^z - 1) / z and its derivative phi1 - phi2, phi2(z) = (phi1(z) - 1) / z: entire functions with phi_k(0) = 1 / k!.
//
// Near zero the quotients cancel, so there the Taylor series phi_k = sum_j z^j / (j + k)! is used, with enough terms that its
// remainder is below the type's rounding. Away from zero the quotient loses at most a few bits. The selected value never
// divides by zero.
#pragma once

#include <type_traits>

#include "common/math.h"

namespace ssm_kernels {

SSM_HOST_DEVICE constexpr double reciprocal_factorial(int n) { return n <= 1 ? 1.0 : reciprocal_factorial(n - 1) / n; }

// sum_{first <= j < terms} z^(j - first) / (j + k)!
template <int k, int terms, int first = 0, typename T>
SSM_HOST_DEVICE T phi_series(T z) {
  using Scalar = typename Math<T>::Scalar;
  constexpr Scalar kCoefficient(reciprocal_factorial(first + k));
  if constexpr (first + 1 == terms) {
    return T(kCoefficient);
  } else {
    return Math<T>::fma(phi_series<k, terms, first + 1>(z), z, T(kCoefficient));
  }
}

// phi1, given ez = e^z.
template <typename T>
SSM_HOST_DEVICE T phi1(T z, T ez) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 15 : 8;
  const T one(Scalar(1));
  const auto near_zero = Math<T>::less(Math<T>::abs(z), T(Scalar(0.5)));
  const T away = Math<T>::select(near_zero, one, z);
  return Math<T>::select(near_zero, phi_series<1, kTerms>(z), (ez - one) * Math<T>::reciprocal(away));
}

// phi1'(z) = phi1 - phi2 = (e^z - phi1) / z, given ez = e^z and p1 = phi1(z). The difference cancels far from zero, the
// quotient near zero.
template <typename T>
SSM_HOST_DEVICE T phi1_derivative(T z, T ez, T p1) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 18 : 10;
  const T one(Scalar(1));
  const auto near_zero = Math<T>::less(Math<T>::abs(z), one);
  const T away = Math<T>::select(near_zero, one, z);
  return Math<T>::select(near_zero, p1 - phi_series<2, kTerms>(z), (ez - p1) * Math<T>::reciprocal(away));
}

}  // namespace ssm_kernels
