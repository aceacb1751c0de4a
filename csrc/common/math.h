// Math<T>: the elementary functions that the formulas in common/ use, for one number type T.
//
// Math<float> and Math<double> serve device code and scalar host code; cpu/vec_math.h adds at::vec's vectors. One formula thus
// compiles for one number, for a SIMD vector of channels, and for a CUDA thread. Masks are bool, or a vector mask.
//
// On the device, float exponentials and reciprocals are single instructions of the special function unit: accurate to 2 ulp,
// denormal results flushed to zero. e^x is 2^(x log2 e), whose argument is rounded once more: a relative error of |x| 2^-24.
#pragma once

#include <cmath>

#include "common/macros.h"

namespace ssm_kernels {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

template <typename T>
struct Math;

template <>
struct Math<float> {
  using Scalar = float;
#if defined(__CUDA_ARCH__)
  static __device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float exp(float x) { return exp2(x * static_cast<float>(kLog2E)); }
  static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float min(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
#else
  static SSM_HOST_DEVICE float exp2(float x) { return ::exp2f(x); }
  static SSM_HOST_DEVICE float exp(float x) { return ::expf(x); }
  static SSM_HOST_DEVICE float reciprocal(float x) { return 1.0f / x; }
  static SSM_HOST_DEVICE float min(float a, float b) { return a <= b || a != a ? a : b; }
#endif
  // min is NaN if its first argument is. Otherwise, if one argument is NaN, min and max are NaN or the other argument.
  static SSM_HOST_DEVICE float max(float a, float b) { return ::fmaxf(a, b); }
  static SSM_HOST_DEVICE float abs(float x) { return ::fabsf(x); }
  static SSM_HOST_DEVICE float negate(float x) { return -x; }
  static SSM_HOST_DEVICE float one_plus_exp_negative(float x) { return 1.0f + exp(-x); }
  static SSM_HOST_DEVICE float sqrt(float x) { return ::sqrtf(x); }
  static SSM_HOST_DEVICE float expm1(float x) { return ::expm1f(x); }
  static SSM_HOST_DEVICE float tanh(float x) { return ::tanhf(x); }
  static SSM_HOST_DEVICE float erf(float x) { return ::erff(x); }
  static SSM_HOST_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
  static SSM_HOST_DEVICE bool less(float a, float b) { return a < b; }
  static SSM_HOST_DEVICE float select(bool mask, float a, float b) { return mask ? a : b; }
};

template <>
struct Math<double> {
  using Scalar = double;
  static SSM_HOST_DEVICE double exp2(double x) { return ::exp2(x); }
  static SSM_HOST_DEVICE double exp(double x) { return ::exp(x); }
  static SSM_HOST_DEVICE double reciprocal(double x) { return 1.0 / x; }
  static SSM_HOST_DEVICE double min(double a, double b) { return a <= b || a != a ? a : b; }
  static SSM_HOST_DEVICE double max(double a, double b) { return ::fmax(a, b); }
  static SSM_HOST_DEVICE double abs(double x) { return ::fabs(x); }
  static SSM_HOST_DEVICE double negate(double x) { return -x; }
  static SSM_HOST_DEVICE double one_plus_exp_negative(double x) { return 1.0 + exp(-x); }
  static SSM_HOST_DEVICE double sqrt(double x) { return ::sqrt(x); }
  static SSM_HOST_DEVICE double expm1(double x) { return ::expm1(x); }
  static SSM_HOST_DEVICE double tanh(double x) { return ::tanh(x); }
  static SSM_HOST_DEVICE double erf(double x) { return ::erf(x); }
  static SSM_HOST_DEVICE double fma(double a, double b, double c) { return ::fma(a, b, c); }
  static SSM_HOST_DEVICE bool less(double a, double b) { return a < b; }
  static SSM_HOST_DEVICE double select(bool mask, double a, double b) { return mask ? a : b; }
};

}  // namespace ssm_kernels
