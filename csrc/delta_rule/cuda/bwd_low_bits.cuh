// The bits of E below those of bf16, for the gradient of beta (bwd_chunks.cuh). That is the one number a step that a sum over
// the rows of V gives, so that roundings of E make a third of its error: the states' kernel keeps the next four bits of each
// element, and the last kernel adds the products of dv and what they stand for. These are small: bf16 is accurate enough.
//
// A thread packs the elements of its own accumulators of E^T, and the thread with the same place in a warpgroup of the last
// kernel unpacks them. In fp16 E is accurate enough.
#pragma once

#include "delta_rule/cuda/bwd_workspace.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
constexpr bool kHasLowBits = std::is_same_v<Scalar, __nv_bfloat16>;

// The four bits of E(row, step) and E(row, step + 1) of pair i of a word are at bit 4 i of its halves.
__device__ __forceinline__ uint4 pack_low_bits(const float (&e)[kStepBlocks][4]) {
  uint32_t words[kStepGroups];
#pragma unroll
  for (int j = 0; j < kStepGroups; ++j) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = e[2 * j + i / 2];
      const uint32_t bits = __byte_perm(__float_as_uint(pair[i % 2 * 2]), __float_as_uint(pair[i % 2 * 2 + 1]), 0x5410);
      word = ((word >> 4) & 0x0FFF0FFF) | (bits & 0xF000F000);
    }
    words[j] = word;
  }
  return {words[0], words[1], words[2], words[3]};
}

// Sums over rows of V of the products of dv and the low bits of E, for the pairs of steps of a lane's accumulators.
struct LowBitSums {
  __nv_bfloat162 of_blocks[kStepBlocks];  // in kUnit
  static constexpr float kUnit = 0x1p-12f;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& sum : of_blocks) sum = __nv_bfloat162{__ushort_as_bfloat16(0), __ushort_as_bfloat16(0)};
  }

  // Rows of `grad_v` are steps, and those of `e` are rows of V.
  __device__ __forceinline__ void add(SmemTile<kStateRows>& grad_v, SmemTile<kChunk>& e, const uint4& packed,
                                      const FragmentLane& lane) {
    const uint32_t words[kStepGroups] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) {
      uint32_t gradients[4], rounded[4];
      cuda::ldmatrix_transposed(gradients, grad_v.ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
      cuda::ldmatrix(rounded, e.ldmatrix_row(16 * lane.warp, 2 * j, lane.index));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The bits are those of a fraction of the last bit of bf16, which was rounded up if the first of them is set: they and
        // a half are a number from -8 to 8, here twice that above 144.
        const uint32_t shifted = i == 0 ? words[j] << 1 : words[j] >> (4 * i - 1), above = (shifted & 0x001E001E) ^ 0x43114311,
                       exponents = rounded[i % 2 * 2 + i / 2] & 0xFF80FF80;
        const __nv_bfloat162 multiple = __hsub2(as_pair(above), as_pair(0x43104310));
        of_blocks[2 * j + i / 2] =
            __hfma2(__hmul2(as_pair(gradients[i]), as_pair(exponents)), multiple, of_blocks[2 * j + i / 2]);
      }
    }
  }
  // Stores the sums over a warp's 16 rows: lane i has the steps 2 i and 2 i + 1.
  __device__ __forceinline__ void put(__nv_bfloat162 (&target)[kWarpSize], const FragmentLane& lane) {
    // A lane keeps the blocks whose number has the same bit as its quad.
#pragma unroll
    for (int bit = kStepBlocks / 2; bit > 0; bit /= 2) {
      const bool is_high = (lane.quad & bit) != 0;
#pragma unroll
      for (int n = 0; n < bit; ++n) {
        const __nv_bfloat162 kept = is_high ? of_blocks[n + bit] : of_blocks[n],
                             sent = is_high ? of_blocks[n] : of_blocks[n + bit];
        of_blocks[n] = __hadd2(kept, __shfl_xor_sync(kAllLanes, sent, 4 * bit));
      }
    }
    target[lane.index] = of_blocks[0];
  }

 private:
  static __device__ __forceinline__ __nv_bfloat162 as_pair(uint32_t bits) { return reinterpret_cast<__nv_bfloat162&>(bits); }
};

}  // namespace ssm_kernels::delta_rule
