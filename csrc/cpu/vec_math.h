// Math<T> for the SIMD vectors of at::vec, so that the formulas in common/ run on a vector of channels.
//
// Included only by *_cpu_kernel.cpp files, which are compiled once per instruction set; at::vec keeps each set's types apart.
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
  static inline __attribute__((always_inline)) Vec abs(const Vec& x) { return x.abs(); }
  static inline __attribute__((always_inline)) Vec negate(const Vec& x) { return x.neg(); }
  static inline Vec sqrt(const Vec& x) { return x.sqrt(); }
  static inline Vec erf(const Vec& x) { return x.erf(); }
  static inline __attribute__((always_inline)) Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return at::vec::fmadd(a, b, c);
  }
  static inline __attribute__((always_inline)) Vec reciprocal(const Vec& x) { return Vec(Scalar(1)) / x; }
  static inline __attribute__((always_inline)) Vec min(const Vec& a, const Vec& b) { return at::vec::minimum(a, b); }
  static inline __attribute__((always_inline)) Vec max(const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }
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
  // Vectorized::exp, expm1 and tanh are calls into another library, and exp_u20 loses NaN.
  //
  // e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2, and e^r - 1 = r + r^2 p(r), p of degree 4 fitted to minimize the
  // relative error of e^r (3e-9).
  struct Reduced {
    Vec expm1_r, half_scale;  // e^r - 1, and 2^(n-1), which for n = 128 is still finite
  };
  static inline __attribute__((always_inline)) Reduced reduce(const Vec& x) {
    // The clamps keep n inside the exponent field; both let NaN through.
    const Vec clamped = at::vec::clamp_max(at::vec::clamp_min(x, Vec(-87.3f)), Vec(89.0f));
    const Vec shift(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low mantissa bits
    const Vec shifted = at::vec::fmadd(clamped, Vec(1.44269504f), shift);
    const Vec n = shifted - shift;
    Vec r = at::vec::fmadd(n, Vec(-0.693359375f), clamped);
    r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
    Vec p = at::vec::fmadd(r, Vec(0.001381422160193324f), Vec(0.00836889911442995f));
    p = at::vec::fmadd(p, r, Vec(0.04166840761899948f));
    p = at::vec::fmadd(p, r, Vec(0.1666651964187622f));
    p = at::vec::fmadd(p, r, Vec(0.4999999403953552f));
    p = at::vec::fmadd(p * r, r, r);
    // At n = -126 the exponent field is 0: flushed to zero.
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(126)), 23);
    return {p, Vec(_mm512_castsi512_ps(exponent))};
#else
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(126)), 23);
    return {p, Vec(_mm256_castsi256_ps(exponent))};
#endif
  }

  // Within 2 ulp; zero below -87, inf above 88.8, NaN for NaN.
  static inline __attribute__((always_inline)) Vec exp(const Vec& x) {
    const Reduced reduced = reduce(x);
    const Vec e_r = reduced.expm1_r + Vec(1.0f);
    return (e_r + e_r) * reduced.half_scale;
  }

  // 2^n (e^r - 1) + 2^n - 1, without cancellation: where n is not 0, the last two terms are as large as the result. Within 2
  // ulp.
  static inline __attribute__((always_inline)) Vec expm1(const Vec& x) {
    const Reduced reduced = reduce(x);
    const Vec half = at::vec::fmadd(reduced.expm1_r, reduced.half_scale, reduced.half_scale - Vec(0.5f));
    return half + half;
  }

  // e / (e + 2) with e = e^2x - 1, which from x = 10 on is 1. Within 3 ulp.
  static inline __attribute__((always_inline)) Vec tanh(const Vec& x) {
    const Vec e = expm1(at::vec::clamp_max(x + x, Vec(20.0f)));
    return e / (e + Vec(2.0f));
  }
#else
  static inline Vec exp(const Vec& x) { return x.exp(); }
  static inline Vec expm1(const Vec& x) { return x.expm1(); }
  static inline Vec tanh(const Vec& x) { return x.tanh(); }
#endif
};

template <>
struct Math<at::vec::Vectorized<double>> : vec_math::Common<double> {
  using Scalar = double;
  static inline Vec exp(const Vec& x) { return x.exp(); }
  static inline Vec expm1(const Vec& x) { return x.expm1(); }
  static inline Vec tanh(const Vec& x) { return x.tanh(); }
};

}  // namespace ssm_kernels
