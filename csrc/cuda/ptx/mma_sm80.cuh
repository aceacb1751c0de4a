// Matrix products of a warp on fp16 or bf16 operands with fp32 accumulation (mma.sync m16n8k16, compute capability 8.0 and
// newer), and the loads of their operands. With g = lane / 4 and t = lane % 4 a lane holds
//
//   D (16 x 8)   d0, d1: row g, columns 2t, 2t + 1         d2, d3: row g + 8, the same columns
//   A (16 x 16)  a0: row g, columns 2t, 2t + 1             a1: row g + 8         a2, a3: as a0, a1 of columns 8 further
//   B (16 x 8)   b0: rows 2t, 2t + 1, column g             b1: rows 8 further
//
// Each word of A and B has two elements, the first in the lower half. The packed D of two neighboring column blocks is an A.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/constants.h"

namespace ssm_kernels::cuda {

// d += a b
template <typename Scalar>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<Scalar, __half> || std::is_same_v<Scalar, __nv_bfloat16>, "operands are fp16 or bf16");
  if constexpr (std::is_same_v<Scalar, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads four 8 x 8 matrices from shared memory; lane 8 i + r passes the address of row r of matrix i. As for any load, other
// threads' writes are visible after a barrier with them.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  ldmatrix(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  ldmatrix_transposed(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

// Stores the transposes of four 8 x 8 matrices, distributed over lanes like D, to shared memory. Lane 8 i + r passes the
// address of row r of matrix i as stored.
__device__ __forceinline__ void stmatrix_transposed(void* row, const uint32_t (&r)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r[i]));
    const uint32_t target = __shfl_sync(kAllLanes, address, 8 * i + lane / 4) + lane % 4 * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(transposed) : "memory");
  }
#endif
}

// Two neighboring elements: a word of two fp16 or bf16, or a float2.
template <typename Scalar>
using Packed = std::conditional_t<std::is_same_v<Scalar, float>, float2, uint32_t>;

template <typename Scalar>
__device__ __forceinline__ Packed<Scalar> pack(float low, float high) {
  Packed<Scalar> result;
  if constexpr (std::is_same_v<Scalar, float>) {
    result = {low, high};
  } else if constexpr (std::is_same_v<Scalar, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

template <typename Scalar>
__device__ __forceinline__ float2 unpack(Packed<Scalar> pair) {
  if constexpr (std::is_same_v<Scalar, float>) {
    return pair;
  } else if constexpr (std::is_same_v<Scalar, __half>) {
    __half2 values;
    memcpy(&values, &pair, sizeof(pair));
    return __half22float2(values);
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// The low parts of a hi/lo split: what pack() rounded off, packed. Both together have twice the significant bits.
template <typename Scalar>
__device__ __forceinline__ uint32_t pack_lo(float low, float high, uint32_t packed) {
  const float2 rounded = unpack<Scalar>(packed);
  return pack<Scalar>(low - rounded.x, high - rounded.y);
}

}  // namespace ssm_kernels::cuda
