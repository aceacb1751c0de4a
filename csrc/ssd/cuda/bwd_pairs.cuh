// SSD backward: the pairs of steps of one state tile, computed from x g^T by the consumer warpgroup that has half of the
// columns. See bwd.cuh for the formulas.
#pragma once

#include "ssd/cuda/bwd_sums.cuh"

namespace ssm_kernels::ssd {

constexpr int kHalfChunk = kChunk / kHalves, kHalfBlocks = kHalfChunk / 8;

// Sums over the lane's columns, for its two rows: V for j < i, and V for j = i.
template <typename Scalar>
struct PairRowSums {
  PairSum<Scalar> later[2];
  float same[2];

  __device__ __forceinline__ void store(int half, const FragmentLane& lane, StepSums<Scalar>& sums) const {
    using Sum = PairSum<Scalar>;
    const Sum row_sum = sum_over_row<Sum>({later[0], later[1], Sum(same[0]), Sum(same[1])}, lane);
    const int row = lane.row + lane.pair % 2 * 8;
    if (lane.pair < 2) {
      sums.later[half][row] = row_sum;
    } else if (row / kHalfChunk == half) {
      sums.same[row] = static_cast<float>(row_sum);
    }
  }
};

// The pairs of steps: row j and, of this half of the columns, i.
template <typename Scalar, int pass_blocks>
struct PairProducts {
  float CB[kHalfBlocks][4];  // C_i . B_j for j <= i, else zero
  float W[kHalfBlocks][4];   // W^T, summed over the state tiles
  // A bit for each element: whether step i is in j's sequence and not before j, and whether i is j. Steps may have several
  // rows (gates.cuh).
  uint32_t is_pair, is_same;

  // Sequences begin at the same steps in all heads, so the tables of any head serve.
  __device__ __forceinline__ void begin(int half, const ChunkTables& tables, const FragmentLane& lane, int rank_shift) {
    is_pair = is_same = 0;
    for_each([&](int b, int h, int e) {
      const int j = lane.row + 8 * h, i = half * kHalfChunk + 8 * b + 2 * lane.pair + e;
      float& product = CB[b][2 * h + e];
      if (j >> rank_shift <= i >> rank_shift && j >= tables.first[i]) {
        is_pair |= bit(b, h, e);
      } else {
        product = 0;
      }
      if (j >> rank_shift == i >> rank_shift) is_same |= bit(b, h, e);
      W[b][2 * h + e] = 0;
    });
  }

  // Processes the column blocks from `first` on; xg has x_j . g_i. Adds to W^T and to the rows' sums, stores M^T without the
  // gain to a tile, and the columns' sums to `sums`. If the gates have a gain on the diagonal, M^T has the gains.
  template <typename Tables>
  __device__ __forceinline__ void apply(int half, int first, const Tables& tables, const float (&xg)[pass_blocks][4],
                                        const FragmentPairs<sizeof(Scalar)>& pairs, const FragmentLane& lane,
                                        SmemTile<kChunk, sizeof(Scalar)>& M, PairRowSums<Scalar>& row_sums,
                                        StepSums<Scalar>& sums) {
    const float log2_cumsum[2] = {tables.log2_cumsum[lane.row], tables.log2_cumsum[lane.row + 8]};
    const float gain[2] = {tables.gain[lane.row], tables.gain[lane.row + 8]};
    const int first_column = half * kHalfChunk + 8 * first;
    constexpr bool kDiagonal = kAreDiagonal<Tables>;
    float diagonal_gain[2] = {};
    if constexpr (kDiagonal) {
      diagonal_gain[0] = tables.diagonal_gain[lane.row];
      diagonal_gain[1] = tables.diagonal_gain[lane.row + 8];
    }
    using Sum = PairSum<Scalar>;
    Sum earlier[2 * pass_blocks] = {};
#pragma unroll
    for (int n = 0; n < pass_blocks; ++n) {
      const int b = first + n;
      const int column = first_column + 8 * n + 2 * lane.pair;
      float2 log2_at, log2_lo_at = {};
      if constexpr (kDiagonal) {
        log2_at = *reinterpret_cast<const float2*>(&tables.log2_before[column]);
        if constexpr (kIsFp32<Scalar>) log2_lo_at = *reinterpret_cast<const float2*>(&tables.log2_before_lo[column]);
      } else {
        log2_at = *reinterpret_cast<const float2*>(&tables.log2_cumsum[column]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m[2], own[2] = {};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool counts = (is_pair & bit(b, h, e)) != 0;
          float log2 = (e == 0 ? log2_at.x : log2_at.y) - log2_cumsum[h];
          if constexpr (kIsFp32<Scalar> && kDiagonal) {
            log2 += (e == 0 ? log2_lo_at.x : log2_lo_at.y) - tables.log2_cumsum_lo[lane.row + 8 * h];
          } else if constexpr (kIsFp32<Scalar>) {
            log2 += tables.log2_cumsum_lo[first_column + 8 * n + 2 * lane.pair + e] - tables.log2_cumsum_lo[lane.row + 8 * h];
          }
          const float between = Math<float>::exp2(log2);
          float decay = counts ? between : 0.0f, weight = 0;
          if constexpr (kDiagonal) {
            // The decay of a step's own pair is not at most one.
            const bool is_own = b % 2 == h && (is_same & bit(b, h, e)) != 0;
            decay = is_own ? 1.0f : decay;
            weight = is_own ? diagonal_gain[h] : gain[h] * decay;
          }
          const float u = counts ? xg[n][2 * h + e] : 0.0f;
          const float decayed = u * decay, product = CB[b][2 * h + e];
          float V = decayed * product;
          if constexpr (kDiagonal) {
            m[e] = weight * product;
            W[b][2 * h + e] = fmaf(weight, u, W[b][2 * h + e]);
          } else {
            m[e] = decay * product;
            W[b][2 * h + e] = fmaf(gain[h], decayed, W[b][2 * h + e]);
          }
          // Rows and columns begin at multiples of 16, so only blocks with this parity have elements of the diagonal.
          if (b % 2 == h) {
            const bool is_own = (is_same & bit(b, h, e)) != 0;
            own[e] = is_own ? V : 0.0f;
            V = is_own ? 0.0f : V;
          }
          row_sums.later[h] += V;
          earlier[2 * n + e] = fma(Sum(gain[h]), Sum(V), earlier[2 * n + e]);
        }
        // The rows of a step are in one block.
        if (b % 2 == h && (is_same & (bit(b, h, 0) | bit(b, h, 1))) != 0) row_sums.same[h] = own[0] + own[1];
        pairs.at(M, half * kHalfBlocks + b, h) = cuda::pack<Scalar>(m[0], m[1]);
      }
    }
    const Sum column_sum = sum_over_column(earlier, lane);
    if (!has_column_sum<2 * pass_blocks>(lane)) return;
    const int column = column_sum_index<2 * pass_blocks>(lane);
    sums.earlier[lane.warp][first_column + column / 2 * 8 + 2 * lane.pair + column % 2] = column_sum;
  }

 private:
  static __device__ __forceinline__ constexpr uint32_t bit(int b, int h, int e) { return 1u << (4 * b + 2 * h + e); }
  template <typename Body>
  static __device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) body(b, h, e);
      }
    }
  }
};

}  // namespace ssm_kernels::ssd
