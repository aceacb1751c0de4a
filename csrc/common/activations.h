// softplus, sigmoid and SiLU with their derivatives, for one number or a SIMD vector.
#pragma once

#include <type_traits>

#include "common/math.h"

namespace ssm_kernels {

// log(1 + e) for e in [0, 1], as 2 atanh(s) with s = e / (2 + e) <= 1/3: a series of positive terms, relatively exact for small
// e.
template <typename T>
SSM_HOST_DEVICE T log1p_unit(T e) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 17 : 8;
  const T s = e / (e + T(Scalar(2)));
  const T s2 = s * s;
  T sum(Scalar(1) / Scalar(2 * kTerms - 1));
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int k = kTerms - 2; k >= 0; --k) sum = Math<T>::fma(sum, s2, T(Scalar(1) / Scalar(2 * k + 1)));
  return T(Scalar(2)) * s * sum;
}

// max(x, 0) + log(1 + e^-|x|); the identity above 20, as torch.nn.functional.softplus.
template <typename T>
SSM_HOST_DEVICE T softplus(T x) {
  using Scalar = typename Math<T>::Scalar;
  const T zero(Scalar(0));
  const T positive_part = Math<T>::select(Math<T>::less(x, zero), zero, x);
  const T value = positive_part + log1p_unit(Math<T>::exp(zero - Math<T>::abs(x)));
  return Math<T>::select(Math<T>::less(T(Scalar(20)), x), x, value);
}

template <typename T>
SSM_HOST_DEVICE T sigmoid(T x) {
  using Scalar = typename Math<T>::Scalar;
  const T one(Scalar(1));
  return one / (one + Math<T>::exp(T(Scalar(0)) - x));
}

template <typename T>
SSM_HOST_DEVICE T softplus_derivative(T x) {
  using Scalar = typename Math<T>::Scalar;
  return Math<T>::select(Math<T>::less(T(Scalar(20)), x), T(Scalar(1)), sigmoid(x));
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
