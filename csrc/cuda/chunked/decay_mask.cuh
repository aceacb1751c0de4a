// M^T of a chunk: the products of B and C of pairs of steps (mamba_ssm's bmm_chunk), times the decays between the steps and the
// gains, or on the diagonal the diagonal gains (DiagonalTables). On accumulator fragments (cuda/fragment.cuh), by one
// warpgroup.
#pragma once

#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/fragment.cuh"

namespace ssm_kernels::cuda::chunked {

// For a matrix whose rows are steps in that order: the block of eight steps in one half of the warp's rows, and the lane's
// step.
template <typename Order>
__device__ __forceinline__ int block_of(const FragmentLane& lane, int half) {
  return Order::block_at(2 * lane.warp + half);
}
template <typename Order>
__device__ __forceinline__ int step_of(const FragmentLane& lane, int half) {
  return kBlockSteps * block_of<Order>(lane, half) + lane.quad;
}

// Clears the blocks of M^T left of the diagonal, once. DecayMask writes only the others.
template <typename Order>
__device__ __forceinline__ void clear_left_of_diagonal(SmemTile<kChunk>& bmm, const FragmentLane& lane) {
  if (lane.pair != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int block = 0; block < block_of<Order>(lane, half); ++block) {
      *bmm.vector(lane.row + 8 * half, block) = {0, 0, 0, 0};
    }
  }
}

// Applies decays and gains to this warp's rows of (B C^T)^T, or to `blocks` column blocks of them, which turns them into M^T.
// The constructor reads the table values that all warps need; apply() reads the others, when registers are free.
template <typename Order, bool has_resets, typename Tables = ChunkTables, int blocks = kStepBlocks>
class DecayMask {
 public:
  // rank_shift: of tables with a gain on the diagonal (gates.cuh).
  __device__ __forceinline__ DecayMask(const Tables& tables, const FragmentLane& lane, int rank_shift, int first_block = 0)
      : tables_(tables), lane_(lane), rank_shift_(kAreDiagonal<Tables> ? rank_shift : 0), first_block_(first_block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int step = step_of<Order>(lane, half);
      log2_cumsum_[half] = tables.log2_cumsum[step];
      gain_[half] = tables.gain[step];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns_[i] = column_pair(log2_of_columns(tables), first_block + kFirstColumn + i);
  }

  // Calls put(low, high, n, half) for the lane's pairs of neighboring elements that are not left of the diagonal, indexed as in
  // FragmentPairs.
  template <typename Put>
  __device__ __forceinline__ void apply(const float (&m)[blocks][4], const Put& put) const {
    if constexpr (kIsBalanced) {
      float2 chosen[kChosen];
#pragma unroll
      for (int i = 0; i < kChosen; ++i) chosen[i] = column_pair(log2_of_columns(tables_), is_of_first(i) ? i : kLastChosen - i);
#pragma unroll
      for (int n = kFirstColumn; n < kStepBlocks; ++n) {
        const bool is_on_diagonal = n == kFirstColumn && lane_.warp == n;
        apply_block(m[n][0], m[n][1], columns_[n - kFirstColumn], n, 0, is_on_diagonal, put);
      }
      apply_block(m[kStepBlocks - 1][2], m[kStepBlocks - 1][3], columns_[kColumns - 1], kStepBlocks - 1, 1, lane_.warp == 0,
                  put);
#pragma unroll
      for (int i = 0; i < kChosen; ++i) {
        const int other = kLastChosen - i;
        const bool is_first = is_of_first(i), is_on_diagonal = i == lane_.warp || i == lane_.warp - 1;
        apply_block(is_first ? m[i][0] : m[other][2], is_first ? m[i][1] : m[other][3], chosen[i], is_first ? i : other,
                    is_first ? 0 : 1, is_on_diagonal, put);
      }
    } else {
#pragma unroll
      for (int i = 0; i < blocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = first_block_ + i, block = block_of<Order>(lane_, half);
          if (n < block) continue;
          apply_block(m[i][2 * half], m[i][2 * half + 1], columns_[i], n, half, n == block, put);
        }
      }
    }
  }

 private:
  // FromBothEnds gives each warp 9 blocks (8 x 8) that are not left of the diagonal. Warp w has columns w to 7 in the first
  // half of its rows, and 7 - w to 7 in the second. Columns 3 to 7 of the first half and 7 of the second are common to all
  // warps. The other three, for i = 0, 1, 2, are column i of the first half if i >= w, else column 6 - i of the second.
  static constexpr bool kIsBalanced = std::is_same_v<Order, FromBothEnds>;
  static constexpr int kChosen = kWarpgroupWarps - 1, kLastChosen = kStepBlocks - 2;
  static_assert(kStepBlocks == 2 * kWarpgroupWarps, "each warp has two blocks of steps");
  static_assert(!kIsBalanced || blocks == kStepBlocks, "the warps have equally many blocks only if they have all columns");
  __device__ __forceinline__ bool is_of_first(int i) const { return i >= lane_.warp; }

  static constexpr int kFirstColumn = kIsBalanced ? kChosen : 0, kColumns = blocks - kFirstColumn;

  template <typename Pair = float2, typename Element>
  __device__ __forceinline__ Pair column_pair(const Element (&table)[kChunk], int block) const {
    return *reinterpret_cast<const Pair*>(&table[kBlockSteps * block + 2 * lane_.pair]);
  }

  // The table whose differences from log2_cumsum of the rows are the decays.
  static __device__ __forceinline__ const StepTable& log2_of_columns(const Tables& tables) {
    if constexpr (kAreDiagonal<Tables>) {
      return tables.log2_before;
    } else {
      return tables.log2_cumsum;
    }
  }
  static __device__ __forceinline__ const StepTable& log2_lo_of_columns(const Tables& tables) {
    if constexpr (kAreDiagonal<Tables>) {
      return tables.log2_before_lo;
    } else {
      return tables.log2_cumsum_lo;
    }
  }

  template <typename Put>
  __device__ __forceinline__ void apply_block(float low, float high, const float2& log2_cumsum, int n, int half,
                                              bool is_on_diagonal, const Put& put) const {
    const float log2_of_row = half == 0 ? log2_cumsum_[0] : log2_cumsum_[1], gain = half == 0 ? gain_[0] : gain_[1];
    float log2_between[2] = {log2_cumsum.x - log2_of_row, log2_cumsum.y - log2_of_row};
    if constexpr (std::is_base_of_v<Fp32ChunkTables, Tables>) {
      const float2 lo = column_pair(log2_lo_of_columns(tables_), n);
      const float lo_of_row = tables_.log2_cumsum_lo[step_of<Order>(lane_, half)];
      log2_between[0] += lo.x - lo_of_row;
      log2_between[1] += lo.y - lo_of_row;
    }
    float scaled[2] = {low * (gain * Math<float>::exp2(log2_between[0])), high * (gain * Math<float>::exp2(log2_between[1]))};
    // Zero where step j is after step i, the column, or of an earlier sequence. The product may be Inf or NaN there. All rows
    // of a step are in one block.
    static_assert(kBlockSteps == 8, "a step has up to eight rows");
    const int row_step = lane_.quad >> rank_shift_;
    const int column_steps[2] = {2 * lane_.pair >> rank_shift_, (2 * lane_.pair + 1) >> rank_shift_};
    if (is_on_diagonal && row_step > column_steps[0]) scaled[0] = 0;
    if (is_on_diagonal && row_step > column_steps[1]) scaled[1] = 0;
    if constexpr (kAreDiagonal<Tables>) {
      if (is_on_diagonal) {
        const float diagonal_gain = tables_.diagonal_gain[step_of<Order>(lane_, half)];
        if (row_step == column_steps[0]) scaled[0] = low * diagonal_gain;
        if (row_step == column_steps[1]) scaled[1] = high * diagonal_gain;
      }
    }
    if constexpr (has_resets) {
      const int2 first = column_pair<int2>(tables_.first, n);
      const int row = step_of<Order>(lane_, half);
      if (row < first.x) scaled[0] = 0;
      if (row < first.y) scaled[1] = 0;
    }
    put(scaled[0], scaled[1], n, half);
  }

  const Tables& tables_;
  const FragmentLane& lane_;
  int rank_shift_, first_block_;
  float log2_cumsum_[2], gain_[2];
  float2 columns_[kColumns];
};

// Scales y^T, a column for each step, by the decay from before the chunk.
__device__ __forceinline__ void scale_by_exp_cumsum(float (&y)[kStepBlocks][4], const ChunkTables& tables,
                                                    const FragmentLane& lane) {
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
    const auto exp_cumsum = *reinterpret_cast<const float2*>(&tables.exp_cumsum[8 * n + 2 * lane.pair]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      y[n][2 * half] *= exp_cumsum.x;
      y[n][2 * half + 1] *= exp_cumsum.y;
    }
  }
}

}  // namespace ssm_kernels::cuda::chunked
