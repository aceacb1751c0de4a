// The products of cuda/ptx/wgmma_sm90.cuh on devices that have none, and for fp32: by mma.sync, each warp its own rows, and
// done when the call is. Four warps that begin at a multiple of four call them together; D and operands in registers are the
// same. So is the layout of operands in shared memory, but that a part may begin at any multiple of 128 bytes, and that a
// part's rows of 128 bytes have 32 columns of fp32, whose pieces change places otherwise.
#pragma once

#include "cuda/mma_tf32x3.cuh"
#include "cuda/ptx/mma_sm80.cuh"

namespace ssm_kernels::cuda {

// What the place of a piece of 16 bytes, of the eight of a part's row, is changed by (exclusive or). For 16 bits, so that eight
// rows' pieces of one column lie in different banks: those of ldmatrix. For fp32 two neighboring pieces, eight columns, stay
// neighbors, and those of four rows lie in different banks, be they four that follow one another or each second of eight: what
// one load of cuda/mma_tf32x3.cuh reads.
template <int element_bytes>
__device__ __forceinline__ constexpr uint32_t swizzle(uint32_t row) {
  static_assert(element_bytes == 2 || element_bytes == 4, "operands are of 16 bits or fp32");
  return element_bytes == 2 ? row & 7 : ((row ^ row >> 2) & 1) << 2 | (row & 2);
}

// An operand in shared memory: from 16 rows and 16 columns of a part on.
template <int element_bytes>
struct WarpOperand {
  uint32_t panel;        // the address of the first part
  uint32_t offset = 0;   // bytes from there to the rows, in the part that has the columns
  uint32_t column = 0;   // bytes along a row, before its pieces change places
  uint32_t panel_bytes;  // from one part to the next
  uint32_t lane;         // of the warp's, that loads

  static constexpr uint32_t kRowBytes = 128, kGroupBytes = 16 * element_bytes, kGroupsOfPanel = kRowBytes / kGroupBytes;
};

template <int element_bytes>
__device__ __forceinline__ WarpOperand<element_bytes> make_warp_operand(const void* operand, int panel_bytes, int lane) {
  return {static_cast<uint32_t>(__cvta_generic_to_shared(operand)), 0, 0, static_cast<uint32_t>(panel_bytes),
          static_cast<uint32_t>(lane)};
}
// From an operand on, that of the given group of 16 columns or rows. Column groups of one part: what was asked for before is of
// other bits.
template <int element_bytes>
__device__ __forceinline__ WarpOperand<element_bytes> columns_of(WarpOperand<element_bytes> operand, int group) {
  constexpr int kGroupsOfPanel = WarpOperand<element_bytes>::kGroupsOfPanel;
  operand.offset += group / kGroupsOfPanel * operand.panel_bytes;
  operand.column += group % kGroupsOfPanel * WarpOperand<element_bytes>::kGroupBytes;
  return operand;
}
template <int element_bytes>
__device__ __forceinline__ WarpOperand<element_bytes> rows_of(WarpOperand<element_bytes> operand, int group) {
  operand.offset += group * 16 * WarpOperand<element_bytes>::kRowBytes;
  return operand;
}

// An operand A in registers, 16 rows and 16 columns: for 16 bits as cuda/ptx/mma_sm80.cuh says, for fp32 two of
// cuda/mma_tf32x3.cuh.
template <typename Scalar>
using OperandA = std::conditional_t<std::is_same_v<Scalar, float>, float[8], uint32_t[4]>;

// The four 8 x 8 matrices of 16 rows and 16 columns: down the rows first, or along the columns first.
template <bool columns_first, bool is_transposed>
__device__ __forceinline__ void load_group(uint32_t (&r)[4], const WarpOperand<2>& operand) {
  const uint32_t lane = operand.lane;
  const uint32_t row = columns_first ? lane / 16 * 8 + lane % 8 : lane % 16;
  const uint32_t vector = columns_first ? lane / 8 % 2 : lane / 16;
  const uint32_t first = operand.panel + row * WarpOperand<2>::kRowBytes + (vector ^ swizzle<2>(row)) * 16;
  const uint32_t address = (first ^ operand.column) + operand.offset;
  if constexpr (is_transposed) {
    ldmatrix_transposed(r, address);
  } else {
    ldmatrix(r, address);
  }
}

// Of fp32, from an operand on, that of the given eight columns, of two, or eight rows.
__device__ __forceinline__ WarpOperand<4> eight_columns(WarpOperand<4> operand, int eight) {
  operand.column += eight * 8 * sizeof(float);
  return operand;
}
__device__ __forceinline__ WarpOperand<4> eight_rows(WarpOperand<4> operand, int eight) {
  operand.offset += eight * 8 * WarpOperand<4>::kRowBytes;
  return operand;
}
// A lane's pair, where a product's sum goes along the rows: of eight rows, two columns of eight.
__device__ __forceinline__ void load_pair_of_columns(float& first, float& second, const WarpOperand<4>& operand) {
  const uint32_t row = operand.lane / 4, pair = operand.lane % 4;
  const uint32_t place = operand.panel + row * WarpOperand<4>::kRowBytes + (pair / 2 ^ swizzle<4>(row)) * 16 + pair % 2 * 8;
  const uint32_t address = (place ^ operand.column) + operand.offset;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address));
}
// Where it goes along the columns: of eight columns, two rows of eight. The piece of the second lies in the other half.
__device__ __forceinline__ void load_pair_of_rows(float& first, float& second, const WarpOperand<4>& operand) {
  constexpr uint32_t kOtherHalf = WarpOperand<4>::kRowBytes / 2;
  const uint32_t column = operand.lane / 4, row = operand.lane % 4 * 2;
  static_assert((swizzle<4>(0) ^ swizzle<4>(1)) * 16 == kOtherHalf, "of two rows, from an even one on");
  const uint32_t place = operand.panel + row * WarpOperand<4>::kRowBytes + (column / 4 ^ swizzle<4>(row)) * 16 + column % 4 * 4;
  const uint32_t address = (place ^ operand.column) + operand.offset;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(first) : "r"(address));
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(second) : "r"((address ^ kOtherHalf) + WarpOperand<4>::kRowBytes));
}

// The operand A of 16 rows and 16 columns, or if it is transposed, of as many columns and rows.
template <bool is_transposed>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const WarpOperand<2>& operand) {
  load_group<is_transposed, is_transposed>(a, operand);
}
template <bool is_transposed>
__device__ __forceinline__ void load_a(float (&a)[8], const WarpOperand<4>& operand) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &first = a[4 * step + half], &second = a[4 * step + half + 2];
      if constexpr (is_transposed) {
        load_pair_of_rows(first, second, eight_rows(eight_columns(operand, half), step));
      } else {
        load_pair_of_columns(first, second, eight_rows(eight_columns(operand, step), half));
      }
    }
  }
}

// d += a b from the first of D's blocks on, an even one: those before are not asked for.
template <typename Scalar, bool b_is_transposed, int blocks>
__device__ __forceinline__ void gemm_accumulate(float (&d)[blocks][4], const uint32_t (&a)[4], const WarpOperand<2>& b,
                                                int first_block) {
#pragma unroll
  for (int n = 0; n < blocks; n += 2) {
    if (n < first_block) continue;
    uint32_t b_fragment[4];
    if constexpr (b_is_transposed) {
      load_group<false, true>(b_fragment, columns_of(b, n / 2));
    } else {
      load_group<true, false>(b_fragment, rows_of(b, n / 2));
    }
    mma<Scalar>(d[n], a, b_fragment[0], b_fragment[1]);
    mma<Scalar>(d[n + 1], a, b_fragment[2], b_fragment[3]);
  }
}
// Of so many blocks, whose products do not wait for one another.
template <bool b_is_transposed, int at_once>
__device__ __forceinline__ void gemm_accumulate_blocks(float (*d)[4], const Tf32A (&a)[2], const WarpOperand<4>& b, int first) {
  // Few blocks have a sum for each eight terms.
  constexpr int kSums = at_once > 2 ? 1 : 2;
  float sums[kSums][at_once][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    Tf32B b_fragment[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int n = first + i;
      float pair[2];
      if constexpr (b_is_transposed) {
        load_pair_of_rows(pair[0], pair[1], eight_rows(eight_columns(columns_of(b, n / 2), n % 2), step));
      } else {
        load_pair_of_columns(pair[0], pair[1], eight_rows(eight_columns(b, step), n));
      }
      b_fragment[i].split(pair);
    }
    mma_tf32x3(sums[step % kSums], a[step], b_fragment);
  }
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) d[first + i][j] += kSums == 1 ? sums[0][i][j] : sums[0][i][j] + sums[1][i][j];
  }
}
template <typename Scalar, bool b_is_transposed, int blocks>
__device__ __forceinline__ void gemm_accumulate(float (&d)[blocks][4], const float (&a)[8], const WarpOperand<4>& b,
                                                int first_block) {
  static_assert(std::is_same_v<Scalar, float>, "operands of fp32");
  constexpr int kAtOnce = blocks % 4 == 0 ? 4 : 2;
  Tf32A a_fragment[2];
#pragma unroll
  for (int step = 0; step < 2; ++step) a_fragment[step].split(a + 4 * step);
#pragma unroll
  for (int n = 0; n < blocks; n += kAtOnce) {
    if (n >= first_block) {
      gemm_accumulate_blocks<b_is_transposed, kAtOnce>(d, a_fragment, b, n);
    } else if (n + 2 == first_block && n + 2 < blocks) {
      gemm_accumulate_blocks<b_is_transposed, 2>(d, a_fragment, b, n + 2);
    }
  }
}

// d = a b, or d += a b; a in registers.
template <typename Scalar, bool b_is_transposed, int blocks>
__device__ __forceinline__ void gemm(float (&d)[blocks][4], const OperandA<Scalar>& a, const WarpOperand<sizeof(Scalar)>& b,
                                     bool adds, int first_block = 0) {
  static_assert(blocks % 2 == 0, "operands are loaded for 16 columns of d at once");
  if (!adds) {
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] = 0;
    }
  }
  gemm_accumulate<Scalar, b_is_transposed>(d, a, b, first_block);
}
// Both in shared memory.
template <typename Scalar, bool a_is_transposed, bool b_is_transposed, int blocks>
__device__ __forceinline__ void gemm(float (&d)[blocks][4], const WarpOperand<sizeof(Scalar)>& a,
                                     const WarpOperand<sizeof(Scalar)>& b, bool adds) {
  const int warp = threadIdx.x % 128 / 32;
  OperandA<Scalar> a_fragment;
  if constexpr (a_is_transposed) {
    load_a<true>(a_fragment, columns_of(a, warp));
  } else {
    load_a<false>(a_fragment, rows_of(a, warp));
  }
  gemm<Scalar, b_is_transposed>(d, a_fragment, b, adds);
}

}  // namespace ssm_kernels::cuda
