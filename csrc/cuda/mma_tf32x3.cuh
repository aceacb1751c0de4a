// Matrix products of a warp on fp32 operands by 3xTF32 (mma.sync m16n8k8, compute capability 8.0 and newer). TF32 has 11 of
// fp32's 24 significant bits, so each element is split into a high and a low part. Of the four products of parts, low times low
// is left out (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", arXiv 2203.03341). Tensor cores
// truncate their sums to fp32 instead of rounding them: to sum many terms, sum a few on the tensor cores and add these sums in
// fp32.
//
// With g = lane / 4 and t = lane % 4 a lane holds
//
//   D (16 x 8)  d0, d1: row g, columns 2t, 2t + 1    d2, d3: row g + 8, the same columns
//   A (16 x 8)  a0: row g, column 2t                 a1: row g + 8        a2, a3: as a0, a1 of column 2t + 1
//   B (8 x 8)   b0: row 2t, column g                 b1: row 2t + 1
//
// The instruction orders the summed index differently, which does not change the sum. In this order D's fragment has the
// elements of A's: (d0, d2, d1, d3) is an A.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/macros.h"

namespace ssm_kernels::cuda {

SSM_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

SSM_HOST_DEVICE uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// a b + c rounded towards zero. The host version needs a b + c to be exact in double.
SSM_HOST_DEVICE float fma_towards_zero(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rz(a, b, c);
#else
  const double exact = static_cast<double>(a) * b + c;
  const float nearest = static_cast<float>(exact);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
#endif
}

// The bits of a float and half a unit in TF32's last place. Their high bits are the float rounded to TF32, half away from zero
// (a subnormal one: towards zero). The sum is rounded towards zero, so that it is finite for every finite float: the largest
// floats become the largest TF32 number. The addition runs on the FMA pipe, because the split of operands already fills the
// integer pipe (docs/tuning/ssd_chunk_scan.md).
SSM_HOST_DEVICE uint32_t add_half_unit(uint32_t bits) {
  constexpr uint32_t kSignAndExponent = 0xff800000u;
  constexpr float kHalfUnit = 0x1p-11f;  // in the last place of a number from 1 to 2
  return bits_of_float(fma_towards_zero(float_of_bits(bits & kSignAndExponent), kHalfUnit, float_of_bits(bits)));
}
// The bits of a float rounded to TF32.
SSM_HOST_DEVICE uint32_t tf32_high(uint32_t bits) {
  constexpr int kLowBits = 24 - 11;
  return add_half_unit(bits) & ~0u << kLowBits;
}

// Tensor cores truncate the low part to TF32: an error of at most 2^-23 of the element, or 2^-22 where the high part is
// truncated. The low part of Inf is NaN.
template <int count>
struct Tf32Pair {
  uint32_t high[count], low[count];

  __device__ __forceinline__ void prepare(const float* values) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      high[i] = tf32_high(__float_as_uint(values[i]));
      low[i] = __float_as_uint(values[i] - __uint_as_float(high[i]));
    }
  }
};
// For products of one TF32 number an element (1xTF32): elements rounded to TF32, with an error of at most 2^-11 of the element,
// in the high bits, which are all that tensor cores read.
template <int count>
struct Tf32Rounded {
  uint32_t values[count];

  __device__ __forceinline__ void prepare(const float* elements) {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = add_half_unit(__float_as_uint(elements[i]));
  }
};
using Tf32A = Tf32Pair<4>;
using Tf32B = Tf32Pair<2>;

__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[n] += a b[n] for each n. Consecutive instructions do not depend on one another.
template <int blocks>
__device__ __forceinline__ void mma_tf32x3(float (&d)[blocks][4], const Tf32A& a, const Tf32B (&b)[blocks]) {
#pragma unroll
  for (int n = 0; n < blocks; ++n) mma_tf32(d[n], a.low, b[n].high);
#pragma unroll
  for (int n = 0; n < blocks; ++n) mma_tf32(d[n], a.high, b[n].low);
#pragma unroll
  for (int n = 0; n < blocks; ++n) mma_tf32(d[n], a.high, b[n].high);
}

}  // namespace ssm_kernels::cuda
