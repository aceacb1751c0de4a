// softplus, sigmoid and SiLU with their derivatives, and clamp, for one number or a SIMD vector.
#pragma once

#include <type_traits>

#include "common/math.h"

namespace ssm_kernels {

// log(1 + e) for e in [0, 1], with a small relative error also for small e. Double: 2 atanh(s), s = e / (2 + e) <= 1/3, as a
// series of positive terms. Float: e p(e), p of degree 9 fitted to minimize the relative error (5e-9); no division.
template <typename T>
SSM_HOST_DEVICE T log1p_unit(T e) {
  using Scalar = typename Math<T>::Scalar;
  if constexpr (std::is_same_v<Scalar, double>) {
    constexpr int kTerms = 17;
    const T s = e / (e + T(Scalar(2)));
    const T s2 = s * s;
    T sum(Scalar(1) / Scalar(2 * kTerms - 1));
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int k = kTerms - 2; k >= 0; --k) sum = Math<T>::fma(sum, s2, T(Scalar(1) / Scalar(2 * k + 1)));
    return T(Scalar(2)) * s * sum;
  } else {
    T sum(-0.0032440119f);
    sum = Math<T>::fma(sum, e, T(0.01985140044f));
    sum = Math<T>::fma(sum, e, T(-0.05695941314f));
    sum = Math<T>::fma(sum, e, T(0.10603642f));
    sum = Math<T>::fma(sum, e, T(-0.153055845f));
    sum = Math<T>::fma(sum, e, T(0.1967593625f));
    sum = Math<T>::fma(sum, e, T(-0.2495413302f));
    sum = Math<T>::fma(sum, e, T(0.3332996235f));
    sum = Math<T>::fma(sum, e, T(-0.4999990242f));
    sum = Math<T>::fma(sum, e, T(1.0f));
    return sum * e;
  }
}

// max(x, 0) + log(1 + e^-|x|); the identity above 20, as torch.nn.functional.softplus. (Float needs no branch: above 20 the
// second term, and the derivative's difference from 1, are below rounding.)
template <typename T>
SSM_HOST_DEVICE T softplus(T x) {
  using Scalar = typename Math<T>::Scalar;
  const T zero(Scalar(0));
  const T value = Math<T>::max(x, zero) + log1p_unit(Math<T>::exp(Math<T>::negate(Math<T>::abs(x))));
  if constexpr (std::is_same_v<Scalar, float>) return value;
  return Math<T>::select(Math<T>::less(T(Scalar(20)), x), x, value);
}

template <typename T>
SSM_HOST_DEVICE T sigmoid(T x) {
  return Math<T>::reciprocal(Math<T>::one_plus_exp_negative(x));
}

template <typename T>
SSM_HOST_DEVICE T softplus_derivative(T x) {
  using Scalar = typename Math<T>::Scalar;
  if constexpr (std::is_same_v<Scalar, float>) return sigmoid(x);
  return Math<T>::select(Math<T>::less(T(Scalar(20)), x), T(Scalar(1)), sigmoid(x));
}

// NaN stays NaN.
template <typename T>
SSM_HOST_DEVICE T clamp(T x, T low, T high) {
  x = Math<T>::select(Math<T>::less(x, low), low, x);
  return Math<T>::select(Math<T>::less(high, x), high, x);
}

template <typename T>
SSM_HOST_DEVICE T silu(T x) {
  return x * sigmoid(x);
}

// d silu / dx, given s = sigmoid(x).
template <typename T>
SSM_HOST_DEVICE T silu_derivative(T x, T s) {
  using Scalar = typename Math<T>::Scalar;
  const T one(Scalar(1));
  return s * (one + x * (one - s));
}

}  // namespace ssm_kernels
