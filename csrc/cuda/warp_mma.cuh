// The products of cuda/ptx/wgmma_sm90.cuh by mma.sync, for devices without wgmma and for fp32. Four warps, of which the first
// has a multiple of four as its number, call them together. Each computes its own 16 rows; the result is complete on return. D
// is distributed over lanes as there, and so is an operand A of fp16 or bf16 in registers.
//
// Operands in shared memory have the same layout, with two exceptions. A panel may begin at any multiple of 128 bytes. An fp32
// panel has 32 columns and a swizzle of its own.
#pragma once

#include "cuda/mma_tf32x3.cuh"
#include "cuda/ptx/mma_sm80.cuh"

namespace ssm_kernels::cuda {

// The swizzle of a row: a vector's index among the eight of its 128-byte row is XORed with it. For 16-bit elements, vectors of
// one column in eight rows are in different banks, as ldmatrix needs. For fp32, two neighboring vectors (eight columns) stay
// neighbors. Vectors of one column are in different banks for four consecutive rows and for every second of eight rows:
// one load of an fp32 pair reads such rows.
template <int element_bytes>
__device__ __forceinline__ constexpr uint32_t swizzle(uint32_t row) {
  static_assert(element_bytes == 2 || element_bytes == 4, "operands are fp16, bf16 or fp32");
  return element_bytes == 2 ? row & 7 : ((row ^ row >> 2) & 1) << 2 | (row & 2);
}

// An operand in shared memory, from a group of 16 rows and 16 columns on. is_rounded: products round its fp32 elements, and
// those of the other operand, to TF32 instead of splitting them (cuda/mma_tf32x3.cuh).
template <int element_bytes, bool is_rounded = false>
struct WarpOperand {
  uint32_t panel;        // the address of the first panel
  uint32_t offset = 0;   // bytes from there to the rows, in the panel that has the columns
  uint32_t column = 0;   // bytes along a row, before the swizzle
  uint32_t panel_bytes;  // from one panel to the next
  uint32_t lane;         // the loading lane of the warp

  static constexpr uint32_t kRowBytes = 128, kGroupBytes = 16 * element_bytes, kGroupsOfPanel = kRowBytes / kGroupBytes;
};

template <int element_bytes, bool is_rounded = false>
__device__ __forceinline__ WarpOperand<element_bytes, is_rounded> make_warp_operand(const void* operand, int panel_bytes,
                                                                                    int lane) {
  return {static_cast<uint32_t>(__cvta_generic_to_shared(operand)), 0, 0, static_cast<uint32_t>(panel_bytes),
          static_cast<uint32_t>(lane)};
}
// An operand advanced by `group` groups of 16 columns or rows. Column offsets within a panel are added up before the swizzle is
// applied, so earlier offsets must use other bits.
template <int element_bytes, bool is_rounded>
__device__ __forceinline__ WarpOperand<element_bytes, is_rounded> columns_of(WarpOperand<element_bytes, is_rounded> operand,
                                                                             int group) {
  constexpr int kGroupsOfPanel = WarpOperand<element_bytes>::kGroupsOfPanel;
  operand.offset += group / kGroupsOfPanel * operand.panel_bytes;
  operand.column += group % kGroupsOfPanel * WarpOperand<element_bytes>::kGroupBytes;
  return operand;
}
template <int element_bytes, bool is_rounded>
__device__ __forceinline__ WarpOperand<element_bytes, is_rounded> rows_of(WarpOperand<element_bytes, is_rounded> operand,
                                                                          int group) {
  operand.offset += group * 16 * WarpOperand<element_bytes>::kRowBytes;
  return operand;
}

// An operand A in registers, 16 rows and 16 columns: for fp16 and bf16 the fragment of cuda/ptx/mma_sm80.cuh, for fp32 two of
// cuda/mma_tf32x3.cuh.
template <typename Scalar>
using OperandA = std::conditional_t<std::is_same_v<Scalar, float>, float[8], uint32_t[4]>;

// Loads the four 8 x 8 matrices of 16 rows and 16 columns, in order along the columns first or down the rows first.
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

// An fp32 operand advanced to the given eight of its 16 columns, or by `eight` times eight rows.
template <bool is_rounded>
__device__ __forceinline__ WarpOperand<4, is_rounded> eight_columns(WarpOperand<4, is_rounded> operand, int eight) {
  operand.column += eight * 8 * sizeof(float);
  return operand;
}
template <bool is_rounded>
__device__ __forceinline__ WarpOperand<4, is_rounded> eight_rows(WarpOperand<4, is_rounded> operand, int eight) {
  operand.offset += eight * 8 * WarpOperand<4>::kRowBytes;
  return operand;
}
// A lane's pair for a product that sums along the rows: two neighboring columns of eight, in one of eight rows.
template <bool is_rounded>
__device__ __forceinline__ void load_pair_of_columns(float& first, float& second, const WarpOperand<4, is_rounded>& operand) {
  const uint32_t row = operand.lane / 4, pair = operand.lane % 4;
  const uint32_t base = operand.panel + row * WarpOperand<4>::kRowBytes + (pair / 2 ^ swizzle<4>(row)) * 16 + pair % 2 * 8;
  const uint32_t address = (base ^ operand.column) + operand.offset;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address));
}
// For a product that sums along the columns: two neighboring rows of eight, in one of eight columns.
template <bool is_rounded>
__device__ __forceinline__ void load_pair_of_rows(float& first, float& second, const WarpOperand<4, is_rounded>& operand) {
  constexpr uint32_t kOtherHalf = WarpOperand<4>::kRowBytes / 2;
  const uint32_t column = operand.lane / 4, row = operand.lane % 4 * 2;
  static_assert((swizzle<4>(0) ^ swizzle<4>(1)) * 16 == kOtherHalf,
                "the swizzle puts the odd row's vector into the other half of its row");
  const uint32_t base = operand.panel + row * WarpOperand<4>::kRowBytes + (column / 4 ^ swizzle<4>(row)) * 16 + column % 4 * 4;
  const uint32_t address = (base ^ operand.column) + operand.offset;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(first) : "r"(address));
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(second) : "r"((address ^ kOtherHalf) + WarpOperand<4>::kRowBytes));
}

// Loads the operand A of 16 rows and 16 columns; a transposed one has its rows along the columns.
template <bool is_transposed>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const WarpOperand<2>& operand) {
  load_group<is_transposed, is_transposed>(a, operand);
}
template <bool is_transposed, bool is_rounded>
__device__ __forceinline__ void load_a(float (&a)[8], const WarpOperand<4, is_rounded>& operand) {
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

// d += a b for D's blocks from first_block on, an even number. The blocks before it are not computed.
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
// Loads the fragments of D's blocks from `first` on, of the operand B, for the step-th eight terms of their sums.
template <bool b_is_transposed, typename Fragment, int at_once, bool is_rounded>
__device__ __forceinline__ void load_b(Fragment (&fragments)[at_once], const WarpOperand<4, is_rounded>& b, int first,
                                       int step) {
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
    const int n = first + i;
    float pair[2];
    if constexpr (b_is_transposed) {
      load_pair_of_rows(pair[0], pair[1], eight_rows(eight_columns(columns_of(b, n / 2), n % 2), step));
    } else {
      load_pair_of_columns(pair[0], pair[1], eight_rows(eight_columns(b, step), n));
    }
    fragments[i].prepare(pair);
  }
}

// d += a b for `at_once` blocks, whose instructions do not depend on one another.
template <bool b_is_transposed, int at_once>
__device__ __forceinline__ void gemm_accumulate_blocks(float (*d)[4], const Tf32A (&a)[2], const WarpOperand<4>& b, int first) {
  // Two blocks are too few to hide the latency, so the two groups of eight terms have sums of their own.
  constexpr int kSums = at_once > 2 ? 1 : 2;
  float sums[kSums][at_once][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    Tf32B b_fragment[at_once];
    load_b<b_is_transposed>(b_fragment, b, first, step);
    mma_tf32x3(sums[step % kSums], a[step], b_fragment);
  }
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) d[first + i][j] += kSums == 1 ? sums[0][i][j] : sums[0][i][j] + sums[1][i][j];
  }
}
// The same with operands rounded to TF32. The tensor cores add the products to d: their truncated sums are far more exact.
template <bool b_is_transposed, int at_once>
__device__ __forceinline__ void gemm_accumulate_blocks(float (*d)[4], const Tf32Rounded<4> (&a)[2],
                                                       const WarpOperand<4, true>& b, int first) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    Tf32Rounded<2> b_fragment[at_once];
    load_b<b_is_transposed>(b_fragment, b, first, step);
#pragma unroll
    for (int i = 0; i < at_once; ++i) mma_tf32(d[first + i], a[step].values, b_fragment[i].values);
  }
}
template <typename Scalar, bool b_is_transposed, int blocks, bool is_rounded>
__device__ __forceinline__ void gemm_accumulate(float (&d)[blocks][4], const float (&a)[8], const WarpOperand<4, is_rounded>& b,
                                                int first_block) {
  static_assert(std::is_same_v<Scalar, float>, "these operands are fp32");
  constexpr int kAtOnce = blocks % 4 == 0 ? 4 : 2;
  std::conditional_t<is_rounded, Tf32Rounded<4>, Tf32A> a_fragment[2];
#pragma unroll
  for (int step = 0; step < 2; ++step) a_fragment[step].prepare(a + 4 * step);
#pragma unroll
  for (int n = 0; n < blocks; n += kAtOnce) {
    if (n >= first_block) {
      gemm_accumulate_blocks<b_is_transposed, kAtOnce>(d, a_fragment, b, n);
    } else if (n + 2 == first_block && n + 2 < blocks) {
      gemm_accumulate_blocks<b_is_transposed, 2>(d, a_fragment, b, n + 2);
    }
  }
}

// d = a b, or if `adds` d += a b, with A in registers.
template <typename Scalar, bool b_is_transposed, int blocks, bool is_rounded>
__device__ __forceinline__ void gemm(float (&d)[blocks][4], const OperandA<Scalar>& a,
                                     const WarpOperand<sizeof(Scalar), is_rounded>& b, bool adds, int first_block = 0) {
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
// The same with A in shared memory.
template <typename Scalar, bool a_is_transposed, bool b_is_transposed, int blocks, bool is_rounded>
__device__ __forceinline__ void gemm(float (&d)[blocks][4], const WarpOperand<sizeof(Scalar), is_rounded>& a,
                                     const WarpOperand<sizeof(Scalar), is_rounded>& b, bool adds) {
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
