// Matrix products of a warp on fp32 operands, by three products of TF32 (mma.sync m16n8k8, compute capability 8.0 and newer).
// TF32 has 11 of fp32's 24 binary digits: each element is multiplied as two, high and low, and of the four products that of the
// lows is left out (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", arXiv 2203.03341). The units
// cut their sums off where fp32 ends rather than round them: who adds up many terms adds the sums of a few in fp32.
//
// With g = lane / 4 and t = lane % 4 a lane holds of
//
//   D (16 x 8)  d0, d1: row g, columns 2t, 2t + 1    d2, d3: row g + 8, the same columns
//   A (16 x 8)  a0: row g, column 2t                 a1: row g + 8        a2, a3: as a0, a1 of column 2t + 1
//   B (8 x 8)   b0: row 2t, column g                 b1: row 2t + 1
//
// which is not the order of terms that the instruction names, but of the same sum. So D is, but for its order, A.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace ssm_kernels::cuda {

// The bits of a float rounded to TF32, half away from zero, by what cvt.rna would take more instructions for. No finite float
// is rounded to Inf: the largest of either sign are cut off. Inf becomes the largest TF32, and what it leaves is Inf; of a NaN
// one of the two is NaN.
SSM_HOST_DEVICE uint32_t tf32_high(uint32_t bits) {
  constexpr int kLowDigits = 24 - 11;
  constexpr int32_t kLargest = 0x7f7fffff;            // of positive floats; as integers negative ones are less
  constexpr uint32_t kLargestNegative = 0xff7fffffu;  // as unsigned integers positive ones are less
  const auto rounded = static_cast<int32_t>(bits + (1u << (kLowDigits - 1)));
  const auto finite = static_cast<uint32_t>(rounded < kLargest ? rounded : kLargest);
  return (finite < kLargestNegative ? finite : kLargestNegative) & ~0u << kLowDigits;
}

// Of the low part the units ignore what TF32 has no digits for: 2^-23 of the element, at most, 2^-22 where the high part is cut
// off.
template <int count>
struct Tf32Pair {
  uint32_t high[count], low[count];

  __device__ __forceinline__ void split(const float* values) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      high[i] = tf32_high(__float_as_uint(values[i]));
      low[i] = __float_as_uint(values[i] - __uint_as_float(high[i]));
    }
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

// d[n] += a b[n] for each n: products that do not wait for one another.
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
