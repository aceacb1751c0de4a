// Math<T> for the SIMD vectors of at::vec, so that the formulas in common/ run on a vector of channels.
//
// Included only by cpu/*kernel.cpp files, which are compiled once per instruction set. The types of at::vec differ between
// sets.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include "common/math.h"

namespace ssm_kernels {

inline namespace CPU_CAPABILITY {
namespace vec_math {

template <typename Scalar>
struct Common {
  using Vec = at::vec::Vectorized<Scalar>;
  // e^-x and 1 + e^-x.
  struct Exponential {
    Vec value, plus_one;
  };
  static inline __attribute__((always_inline)) Vec abs(const Vec& x) { return x.abs(); }
  static inline __attribute__((always_inline)) Vec negate(const Vec& x) { return x.neg(); }
  static inline Vec sqrt(const Vec& x) { return x.sqrt(); }
  static inline Vec erf(const Vec& x) { return x.erf(); }
  static inline __attribute__((always_inline)) Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return at::vec::fmadd(a, b, c);
  }
  static inline __attribute__((always_inline)) Vec reciprocal(const Vec& x) { return Vec(Scalar(1)) / x; }
  // One instruction each: NaN if `a` is, `a` if `b` is. at::vec::minimum and maximum are NaN in both cases and take four.
  static inline __attribute__((always_inline)) Vec min(const Vec& a, const Vec& b) { return at::vec::clamp_max(a, b); }
  static inline __attribute__((always_inline)) Vec max(const Vec& a, const Vec& b) { return at::vec::clamp_min(a, b); }
  static inline __attribute__((always_inline)) Vec less(const Vec& a, const Vec& b) { return a < b; }
  static inline __attribute__((always_inline)) Vec select(const Vec& mask, const Vec& a, const Vec& b) {
    return Vec::blendv(b, a, mask);
  }
};

}  // namespace vec_math
}  // namespace CPU_CAPABILITY

template <>
struct Math<at::vec::Vectorized<float>> : vec_math::Common<float> {
  using Scalar = float;

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  // These functions replace Vectorized::exp, expm1 and tanh, which call another library, and exp_u20, which loses NaN.
  //
  // With f = kFactor, e^(f x) = 2^n e^(f s) for n = round(f x / ln 2), |f s| <= ln(2) / 2, and
  // e^(f s) = 1 + f s + |f| s^2 p(s). p has degree 4 and for f = 1 was fitted to minimize the relative error of e^s (3e-9).
  // Other factors are powers of two or their negatives and only scale the constants.
  struct Reduced {
    Vec s, p, scale;  // `scale` is 2^(n + kShift)
  };
  // f x must be between -88 and 89, where n fits the exponent field.
  template <int kFactor, int kShift>
  static inline __attribute__((always_inline)) Reduced reduce(const Vec& x) {
    constexpr float kInverse = 1.0f / kFactor, kMagnitude = kFactor < 0 ? -kFactor : kFactor;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits; 127 is the exponent's bias.
    const Vec shift(12582912.0f + 127.0f + kShift);
    const Vec shifted = at::vec::fmadd(x, Vec(kFactor * 1.44269504f), shift);
    const Vec n = shifted - shift;
    Vec s = at::vec::fmadd(n, Vec(kInverse * -0.693359375f), x);
    s = at::vec::fmadd(n, Vec(kInverse * 2.12194440e-4f), s);
    constexpr float k1 = kMagnitude * kFactor, k2 = k1 * kFactor, k3 = k2 * kFactor, k4 = k3 * kFactor;
    Vec p = at::vec::fmadd(s, Vec(k4 * 0.001381422160193324f), Vec(k3 * 0.00836889911442995f));
    p = at::vec::fmadd(p, s, Vec(k2 * 0.04166840761899948f));
    p = at::vec::fmadd(p, s, Vec(k1 * 0.1666651964187622f));
    p = at::vec::fmadd(p, s, Vec(kMagnitude * 0.4999999403953552f));
    // An exponent field of 0 gives zero, one of 255 gives inf.
#if defined(CPU_CAPABILITY_AVX512)
    return {s, p, Vec(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23)))};
#else
    return {s, p, Vec(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)))};
#endif
  }
  // Lets NaN through.
  static inline __attribute__((always_inline)) Vec bounded(const Vec& x, float least, float most) {
    return at::vec::clamp_max(at::vec::clamp_min(x, Vec(least)), Vec(most));
  }
  template <int kSign>
  static inline __attribute__((always_inline)) Vec exp_reduced(const Vec& s, const Vec& p) {
    static_assert(kSign == 1 || kSign == -1);
    return at::vec::fmadd(at::vec::fmadd(p, s, Vec(kSign)), s, Vec(1.0f));
  }

  // Within 2 ulp; zero below -87, inf above 88.8, NaN for NaN. Scales by 2^(n-1), because 2^n is inf for n = 128.
  static inline __attribute__((always_inline)) Vec exp(const Vec& x) {
    const Reduced reduced = reduce<1, -1>(bounded(x, -87.3f, 89.0f));
    const Vec e_s = exp_reduced<1>(reduced.s, reduced.p);
    return (e_s + e_s) * reduced.scale;
  }

  // Within 2 ulp; inf below -88.4, where its reciprocal is denormal, NaN for NaN.
  static inline __attribute__((always_inline)) Vec one_plus_exp_negative(const Vec& x) {
    const Reduced reduced = reduce<-1, 0>(bounded(x, -89.0f, 87.3f));
    return at::vec::fmadd(exp_reduced<-1>(reduced.s, reduced.p), reduced.scale, Vec(1.0f));
  }

  // Within 2 ulp; 0 and 1 from x = 87.7 on; those of `least` below it.
  static inline __attribute__((always_inline)) Exponential exp_negative(const Vec& x, float least) {
    const Reduced reduced = reduce<-1, 0>(bounded(x, least, 88.0f));
    const Vec e_s = exp_reduced<-1>(reduced.s, reduced.p);
    return {e_s * reduced.scale, at::vec::fmadd(e_s, reduced.scale, Vec(1.0f))};
  }

  // 2^n (e^s - 1) + 2^n - 1, within 2 ulp. It does not cancel: unless n is 0, the last two terms are as large as the result.
  static inline __attribute__((always_inline)) Vec expm1(const Vec& x) {
    const Reduced reduced = reduce<1, -1>(bounded(x, -87.3f, 89.0f));
    const Vec expm1_s = at::vec::fmadd(reduced.p * reduced.s, reduced.s, reduced.s);
    const Vec half = at::vec::fmadd(expm1_s, reduced.scale, reduced.scale - Vec(0.5f));
    return half + half;
  }

  // e / (e + 1) with e = (e^2x - 1) / 2, within 3 ulp; 1 from x = 10 on.
  static inline __attribute__((always_inline)) Vec tanh(const Vec& x) {
    const Reduced reduced = reduce<2, 0>(bounded(x, -10.0f, 10.0f));
    const Vec e_s = at::vec::fmadd(reduced.p * reduced.s, reduced.s, reduced.s);  // (e^2s - 1) / 2
    const Vec e = at::vec::fmadd(e_s, reduced.scale, at::vec::fmadd(reduced.scale, Vec(0.5f), Vec(-0.5f)));
    return e / (e + Vec(1.0f));
  }
#else
  static inline Vec exp(const Vec& x) { return x.exp(); }
  static inline Vec one_plus_exp_negative(const Vec& x) { return Vec(Scalar(1)) + exp(x.neg()); }
  static inline Exponential exp_negative(const Vec& x, Scalar least) {
    const Vec e = exp(at::vec::clamp_min(x, Vec(least)).neg());
    return {e, Vec(Scalar(1)) + e};
  }
  static inline Vec expm1(const Vec& x) { return x.expm1(); }
  static inline Vec tanh(const Vec& x) { return x.tanh(); }
#endif
};

template <>
struct Math<at::vec::Vectorized<double>> : vec_math::Common<double> {
  using Scalar = double;
  static inline Vec exp(const Vec& x) { return x.exp(); }
  static inline Vec one_plus_exp_negative(const Vec& x) { return Vec(Scalar(1)) + exp(x.neg()); }
  static inline Exponential exp_negative(const Vec& x, Scalar least) {
    const Vec e = exp(at::vec::clamp_min(x, Vec(least)).neg());
    return {e, Vec(Scalar(1)) + e};
  }
  static inline Vec expm1(const Vec& x) { return x.expm1(); }
  static inline Vec tanh(const Vec& x) { return x.tanh(); }
};

}  // namespace ssm_kernels
