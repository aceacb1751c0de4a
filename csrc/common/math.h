// The elementary functions that the formulas in common/ are written with, for one number type T.
//
// Math<float> and Math<double> serve the device and scalar host code; cpu/vec_math.h adds at::vec's vectors, so that the same
// formula is compiled for one number, for a SIMD vector of channels, and for a CUDA thread. Masks are bool, or a vector mask.
#pragma once

#include <cmath>

#include "common/macros.h"

namespace ssm_kernels {

template <typename T>
struct Math;

template <>
struct Math<float> {
  using Scalar = float;
  static SSM_HOST_DEVICE float exp(float x) { return ::expf(x); }
  static SSM_HOST_DEVICE float abs(float x) { return ::fabsf(x); }
  static SSM_HOST_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
  static SSM_HOST_DEVICE bool less(float a, float b) { return a < b; }
  static SSM_HOST_DEVICE float select(bool mask, float a, float b) { return mask ? a : b; }
};

template <>
struct Math<double> {
  using Scalar = double;
  static SSM_HOST_DEVICE double exp(double x) { return ::exp(x); }
  static SSM_HOST_DEVICE double abs(double x) { return ::fabs(x); }
  static SSM_HOST_DEVICE double fma(double a, double b, double c) { return ::fma(a, b, c); }
  static SSM_HOST_DEVICE bool less(double a, double b) { return a < b; }
  static SSM_HOST_DEVICE double select(bool mask, double a, double b) { return mask ? a : b; }
};

}  // namespace ssm_kernels
