// The gates of one step of xLSTM's matrix memory, for scan and decoding step, on CPU and CUDA.
//
// The memory is in units of e^m, and e^-inf is the unit of an empty one. A step moves it to the unit m' = max(log sigmoid(f) +
// m, i), or to 0 with a sigmoid input gate: it decays by e^(log sigmoid(f) + m - m') and takes in v k^T times the gain, e^(i -
// m') or sigmoid(i).
#pragma once

#include <cmath>

#include "common/math.h"

namespace ssm_kernels {

// log sigmoid(x) = min(x, 0) - log(1 + e^-|x|): minus infinity stays, and plus infinity becomes 0.
template <typename T>
SSM_HOST_DEVICE T log_sigmoid(T x) {
  return (x < T(0) ? x : T(0)) - ::log1p(Math<T>::exp(-Math<T>::abs(x)));
}

// The unit after a step whose forget gate has the logarithm `log_forget`.
template <typename T>
SSM_HOST_DEVICE T unit_after(T unit, T i, T log_forget, bool is_exp) {
  if (!is_exp) return T(0);
  const T carried = log_forget + unit;
  return carried >= i || carried != carried ? carried : i;
}

// The logarithm of the decay from one unit to the next. Minus infinity minus itself would be NaN: an empty memory stays empty.
template <typename T>
SSM_HOST_DEVICE T log_decay_between(T unit, T next, T log_forget) {
  constexpr T kNone = -static_cast<T>(INFINITY);
  return unit == kNone || next == kNone ? kNone : log_forget + (unit - next);
}

template <typename T>
SSM_HOST_DEVICE T input_gain(T i, T next, bool is_exp) {
  if (!is_exp) return T(1) / (T(1) + Math<T>::exp(-i));
  return next == -static_cast<T>(INFINITY) ? T(0) : Math<T>::exp(i - next);
}

}  // namespace ssm_kernels
