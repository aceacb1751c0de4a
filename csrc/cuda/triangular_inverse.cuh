// The inverse M of a unit lower triangular matrix I + A of 64 rows, by one warpgroup.
//
// Warp w holds row block w, 16 rows, of A as accumulators. It inverts its diagonal block in registers: two blocks of eight rows
// by elimination in fp32, and the one below them by 3xTF32 products. Then it computes the rows of M^T that belong to its 16
// columns, block by block to the right:
//
//   M^T (w, i) = -(sum over j from w to i - 1 of M^T (w, j) A (i, j)^T) M(i, i)^T
//
// in products of TF32 numbers with fp32 accumulation, or if `is_split` in products of 3xTF32. Neumann doubling, (I - A)(I +
// A^2)..., would square A instead: for equal keys its powers grow to 1e18 before they cancel.
//
// M^T (w, j) stays in registers, because the accumulators of two neighboring column blocks are an operand A
// (cuda/mma_tf32x3.cuh). A (i, j) and M(i, i) are accumulators of other warps and operands B without a change of layout: in
// shared memory they are in the order of lanes. The functions without a template parameter `warp` are the same code for all
// warps, because they count blocks from the diagonal: with code of its own for each warp, a kernel may be bound by the fetching
// of instructions.
#pragma once

#include <type_traits>

#include "cuda/fragment.cuh"
#include "cuda/mma_tf32x3.cuh"

namespace ssm_kernels::cuda {

template <bool is_split>
class TriangularInverseOf {
 public:
  static constexpr int kBlocks = kWarpgroupWarps, kBlockRows = 16, kColumnBlocks = 2 * kBlocks;  // of 8 columns

  // The rows of M^T in the diagonal block, of the warp's 16 columns.
  using DiagonalBlock = float[2][4];

  // Takes the warp's rows of A: elements on and above the diagonal are zero, or in blocks right of the diagonal anything.
  // Inverts the diagonal block.
  template <int warp>
  __device__ __forceinline__ void put(const float (&a)[kColumnBlocks][4], DiagonalBlock& transposed, const FragmentLane& lane) {
    put_left(a, lane);
    put_diagonal(a[2 * warp], a[2 * warp + 1], transposed, lane);
  }

  // The same in two parts: the blocks left of the diagonal, and the diagonal block. Of `a` the other blocks are ignored.
  __device__ __forceinline__ void put_left(const float (&a)[kColumnBlocks][4], const FragmentLane& lane) {
#pragma unroll
    for (int j = 0; j < kBlocks - 1; ++j) {
      if (j < lane.warp) put_words(products_[product_of(lane.warp, j)], a[2 * j], a[2 * j + 1], lane);
    }
  }
  __device__ __forceinline__ void put_diagonal(const float (&left)[4], const float (&right)[4], DiagonalBlock& transposed,
                                               const FragmentLane& lane) {
    // The two blocks of eight rows of M on the diagonal.
    float first[2], second[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) first[i] = second[i] = lane.quad == 2 * lane.pair + i ? 1.0f : 0.0f;
    const auto eliminate = [&](float (&m)[2], float even, float odd, int j) {
      const float factor = __shfl_sync(kAllLanes, j % 2 == 0 ? even : odd, 4 * lane.quad + j / 2);
      const float row[2] = {__shfl_sync(kAllLanes, m[0], 4 * j + lane.pair), __shfl_sync(kAllLanes, m[1], 4 * j + lane.pair)};
#pragma unroll
      for (int i = 0; i < 2; ++i) m[i] = fmaf(-factor, row[i], m[i]);
    };
#pragma unroll
    for (int j = 0; j < 7; ++j) {
      eliminate(first, left[0], left[1], j);
      eliminate(second, right[2], right[3], j);
    }
    const auto transpose = [&](const float (&m)[2], float& low, float& high) {
      const auto element = [&](int i) {
        const int source = 4 * (2 * lane.pair + i) + lane.quad / 2;
        const float even = __shfl_sync(kAllLanes, m[0], source), odd = __shfl_sync(kAllLanes, m[1], source);
        return lane.quad % 2 == 0 ? even : odd;
      };
      low = element(0);
      high = element(1);
    };
    transpose(first, transposed[0][0], transposed[0][1]);
    transpose(second, transposed[1][2], transposed[1][3]);
    // The block of M below the diagonal is -second C first, with C that of A. A block of accumulators is an operand A, and as B
    // it is the transposed one.
    const auto multiply_block = [](const float (&a)[2], const float (&b)[2], float (&product)[2]) {
      const float rows[4] = {a[0], 0, a[1], 0};
      Tf32A left_operand;
      Tf32B right_operand[1];
      left_operand.prepare(rows);
      right_operand[0].prepare(b);
      float sums[1][4] = {};
      mma_tf32x3(sums, left_operand, right_operand);
      product[0] = sums[0][0];
      product[1] = sums[0][1];
    };
    float c_first[2], below[2], below_transposed[2];  // c_first: (C first)^T
    multiply_block({transposed[0][0], transposed[0][1]}, {left[2], left[3]}, c_first);
    multiply_block(second, c_first, below);
    multiply_block(c_first, second, below_transposed);
    put_words(inverses_[lane.warp], {-first[0], -first[1], below[0], below[1]}, {0, 0, -second[0], -second[1]}, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) transposed[1][i] = -below_transposed[i];
    transposed[0][2] = transposed[0][3] = 0;
  }

  // Computes the warp's rows of M^T, after a barrier of the warpgroup: calls emit(n, values) for each block of 8 columns from
  // the diagonal on.
  template <int warp, typename Emit>
  __device__ __forceinline__ void multiply(const DiagonalBlock& diagonal, const FragmentLane& lane, const Emit& emit) const {
    multiply(diagonal, lane, [&](int n, const float (&values)[4]) { emit(2 * warp + n, values); });
  }
  // The same; emit counts blocks from the diagonal.
  template <typename Emit>
  __device__ __forceinline__ void multiply(const DiagonalBlock& diagonal, const FragmentLane& lane, const Emit& emit) const {
    float block[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) block[n][i] = diagonal[n][i];
      emit(n, block[n]);
    }
    Operand rows[kBlocks - 1];
#pragma unroll
    for (int distance = 1; distance < kBlocks; ++distance) {
      const int column_block = lane.warp + distance;
      if (column_block >= kBlocks) return;
      rows[distance - 1].prepare(block);
      float sums[2][2][4] = {};
#pragma unroll
      for (int j = 0; j < distance; ++j) {
        rows[j].multiply(sums[0], sums[1], products_[product_of(column_block, lane.warp + j)], lane);
      }
      add(sums[0], sums[1]);
      Operand summed;
      summed.prepare(sums[0]);
      float other[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) block[n][i] = 0;
      }
      summed.multiply(block, other, inverses_[column_block], lane);
      add(block, other);
#pragma unroll
      for (int n = 0; n < 2; ++n) emit(2 * distance + n, block[n]);
    }
  }

 private:
  static constexpr int kProducts = kBlocks * (kBlocks - 1) / 2;

  // The accumulators of a block of 16 x 16, rounded to TF32 unless is_split, in the order of lanes: an operand B of products
  // with its transpose.
  using Words = uint4[2][kWarpSize];

  static __device__ __forceinline__ void put_words(Words& words, const float (&first)[4], const float (&second)[4],
                                                   const FragmentLane& lane) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float (&block)[4] = n == 0 ? first : second;
      if constexpr (is_split) {
        words[n][lane.index] = {__float_as_uint(block[0]), __float_as_uint(block[1]), __float_as_uint(block[2]),
                                __float_as_uint(block[3])};
      } else {
        Tf32Rounded<4> rounded;
        rounded.prepare(block);
        words[n][lane.index] = {rounded.values[0], rounded.values[1], rounded.values[2], rounded.values[3]};
      }
    }
  }

  // An operand A, 16 x 16.
  struct Operand {
    std::conditional_t<is_split, Tf32A, Tf32Rounded<4>> columns[2];

    __device__ __forceinline__ void prepare(const float (&d)[2][4]) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float values[4] = {d[n][0], d[n][2], d[n][1], d[n][3]};
        columns[n].prepare(values);
      }
    }
    // Adds the product with the transpose of a block, in two parts.
    __device__ __forceinline__ void multiply(float (&sum)[2][4], float (&other_sum)[2][4], const Words& words,
                                             const FragmentLane& lane) const {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 b = words[n][lane.index];
        if constexpr (is_split) {
          Tf32B pairs[2];
          const float first[2] = {__uint_as_float(b.x), __uint_as_float(b.y)},
                      second[2] = {__uint_as_float(b.z), __uint_as_float(b.w)};
          pairs[0].prepare(first);
          pairs[1].prepare(second);
          mma_tf32x3(n == 0 ? sum : other_sum, columns[n], pairs);
        } else {
          mma_tf32(n == 0 ? sum[0] : other_sum[0], columns[n].values, {b.x, b.y});
          mma_tf32(n == 0 ? sum[1] : other_sum[1], columns[n].values, {b.z, b.w});
        }
      }
    }
  };

  static __device__ __forceinline__ void add(float (&sum)[2][4], const float (&other)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] += other[n][i];
    }
  }
  static __device__ __forceinline__ constexpr int product_of(int row_block, int column_block) {
    return row_block * (row_block - 1) / 2 + column_block;
  }

  Words products_[kProducts], inverses_[kBlocks];
};
using TriangularInverse = TriangularInverseOf<false>;

}  // namespace ssm_kernels::cuda
