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
  static inline Vec sqrt(const Vec& x) { return x.sqrt(); }
  static inline Vec expm1(const Vec& x) { return x.expm1(); }
  static inline Vec tanh(const Vec& x) { return x.tanh(); }
  static inline __attribute__((always_inline)) Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return at::vec::fmadd(a, b, c);
  }
  static inline __attribute__((always_inline)) Vec reciprocal(const Vec& x) { return Vec(Scalar(1)) / x; }
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
  // e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2, and e^r = 1 + r + r^2 p(r), p of degree 4 fitted to minimize the
  // relative error (3e-9). Within 2 ulp; zero below -87, inf above 88.8, NaN for NaN. Vectorized::exp is
  // a call into another library, and exp_u20 loses NaN.
  static inline __attribute__((always_inline)) Vec exp(const Vec& x) {
    // The clamps keep n inside the exponent field; both let NaN through.
    const Vec clamped = at::vec::clamp_max(at::vec::clamp_min(x, Vec(-87.3f)), Vec(89.5f));
    const Vec shift(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low mantissa bits
    const Vec shifted = at::vec::fmadd(clamped, Vec(1.44269504f), shift);
    const Vec n = shifted - shift;
    Vec r = at::vec::fmadd(n, Vec(-0.693359375f), clamped);
    r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
    Vec p = at::vec::fmadd(r, Vec(0.001381422160193324f), Vec(0.00836889911442995f));
    p = at::vec::fmadd(p, r, Vec(0.04166840761899948f));
    p = at::vec::fmadd(p, r, Vec(0.1666651964187622f));
    p = at::vec::fmadd(p, r, Vec(0.4999999403953552f));
    p = at::vec::fmadd(p * r, r, r) + Vec(1.0f);
    // 2^(n-1), so that n = 128 is still finite, times 2 p. At n = -126 the exponent field is 0: flushed to zero.
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(126)), 23);
    return (p + p) * Vec(_mm512_castsi512_ps(exponent));
#else
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(126)), 23);
    return (p + p) * Vec(_mm256_castsi256_ps(exponent));
#endif
  }
#else
  static inline Vec exp(const Vec& x) { return x.exp(); }
#endif
};

template <>
struct Math<at::vec::Vectorized<double>> : vec_math::Common<double> {
  using Scalar = double;
  static inline Vec exp(const Vec& x) { return x.exp(); }
};

}  // namespace ssm_kernels
