// The products of cuda/wgmma.cuh on devices that have none: by mma.sync, each warp its own rows, and done when the call is.
// Four warps that begin at a multiple of four call them together; D, operands in registers and the layout of operands in shared
// memory are the same, but that a part may begin at any multiple of 128 bytes.
#pragma once

#include "cuda/mma.cuh"

namespace ssm_kernels::cuda {

// An operand in shared memory: from 16 rows and 16 columns of a part on.
struct WarpOperand {
  uint32_t part;        // the address of the first part
  uint32_t offset = 0;  // bytes from there to the rows, in the part that has the columns
  uint32_t column = 0;  // bytes along a row, before its pieces change places
  uint32_t part_bytes;  // from one part to the next
  uint32_t lane;        // of the warp's, that loads

  static constexpr uint32_t kRowBytes = 128, kGroupBytes = 32, kGroupsOfPart = kRowBytes / kGroupBytes;
};

__device__ __forceinline__ WarpOperand describe_warp_operand(const void* operand, int part_bytes, int lane) {
  return {static_cast<uint32_t>(__cvta_generic_to_shared(operand)), 0, 0, static_cast<uint32_t>(part_bytes),
          static_cast<uint32_t>(lane)};
}
// From an operand on, that of the given group of 16 columns or rows. Column groups of one part: what was asked for before is of
// other bits.
__device__ __forceinline__ WarpOperand columns_of(WarpOperand operand, int group) {
  operand.offset += group / WarpOperand::kGroupsOfPart * operand.part_bytes;
  operand.column += group % WarpOperand::kGroupsOfPart * WarpOperand::kGroupBytes;
  return operand;
}
__device__ __forceinline__ WarpOperand rows_of(WarpOperand operand, int group) {
  operand.offset += group * 16 * WarpOperand::kRowBytes;
  return operand;
}

// The four 8 x 8 matrices of 16 rows and 16 columns: down the rows first, or along the columns first.
template <bool columns_first, bool is_transposed>
__device__ __forceinline__ void load_group(uint32_t (&r)[4], const WarpOperand& operand) {
  const uint32_t lane = operand.lane;
  const uint32_t row = columns_first ? lane / 16 * 8 + lane % 8 : lane % 16;
  const uint32_t piece = columns_first ? lane / 8 % 2 : lane / 16;
  const uint32_t first = operand.part + row * WarpOperand::kRowBytes + (piece ^ row % 8) * 16;
  const uint32_t address = (first ^ operand.column) + operand.offset;
  if constexpr (is_transposed) {
    load_matrices_transposed(r, address);
  } else {
    load_matrices(r, address);
  }
}

// d = a b, or d += a b; a in registers.
template <typename Scalar, bool b_is_transposed, int blocks>
__device__ __forceinline__ void multiply(float (&d)[blocks][4], const uint32_t (&a)[4], const WarpOperand& b, bool adds) {
  static_assert(blocks % 2 == 0, "operands are loaded for 16 columns of d at once");
  if (!adds) {
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] = 0;
    }
  }
#pragma unroll
  for (int n = 0; n < blocks / 2; ++n) {
    uint32_t of_b[4];
    if constexpr (b_is_transposed) {
      load_group<false, true>(of_b, columns_of(b, n));
    } else {
      load_group<true, false>(of_b, rows_of(b, n));
    }
    mma<Scalar>(d[2 * n], a, of_b[0], of_b[1]);
    mma<Scalar>(d[2 * n + 1], a, of_b[2], of_b[3]);
  }
}
// Both in shared memory.
template <typename Scalar, bool a_is_transposed, bool b_is_transposed, int blocks>
__device__ __forceinline__ void multiply(float (&d)[blocks][4], const WarpOperand& a, const WarpOperand& b, bool adds) {
  const int warp = threadIdx.x % 128 / 32;
  uint32_t of_a[4];
  if constexpr (a_is_transposed) {
    load_group<true, true>(of_a, columns_of(a, warp));
  } else {
    load_group<false, false>(of_a, rows_of(a, warp));
  }
  multiply<Scalar, b_is_transposed>(d, of_a, b, adds);
}

}  // namespace ssm_kernels::cuda
