// Stores of the gradients that the last kernel of the delta rule's backward computes (bwd_chunks.cuh), from accumulators of
// which rows are steps.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/vector_io.cuh"
#include "delta_rule/cuda/bwd_low_bits.cuh"
#include "delta_rule/cuda/step_updates.cuh"

namespace ssm_kernels::delta_rule {

// The sums from which one warp computes the gradients of betas.
struct BetaSums {
  float products[kChunk];                               // of each step, the element of dv E^T on the diagonal
  __nv_bfloat162 low_bits[kWarpgroupWarps][kWarpSize];  // of a warp's rows of V, in LowBitSums::kUnit, of two steps
};

template <typename Scalar, int columns>
struct BwdGradients {
  static constexpr int kColumnBlocks = columns / 8;

  const DeltaRuleBwdParams& p;

  // With several value heads of a key head a block computes them in order, and those of the last one are the sums of all: until
  // then this thread adds them up in p.sums, of which blocks need so little that it stays in the L2 cache. `index` is that of
  // the warpgroup.
  __device__ __forceinline__ void add_value_head(float (&d)[kColumnBlocks][4], int value_head, bool is_last, int index) const {
    float4* const sums = reinterpret_cast<float4*>(p.sums) +
                         (blockIdx.x * kWarpgroups + index) * (kColumnBlocks * kWarpgroupThreads) +
                         threadIdx.x % kWarpgroupThreads;
    if (value_head > 0) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float4 sum = __ldcg(sums + n * kWarpgroupThreads);
        d[n][0] += sum.x;
        d[n][1] += sum.y;
        d[n][2] += sum.z;
        d[n][3] += sum.w;
      }
    }
    if (is_last) return;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      __stcg(sums + n * kWarpgroupThreads, float4{d[n][0], d[n][1], d[n][2], d[n][3]});
    }
  }

  // Makes gradients of rows of those of normalized rows. Of a row x with the factor r, d is r times the latter, and
  // d - r^2 x (x . d) the former.
  static __device__ __forceinline__ void apply_norm(float (&d)[kColumnBlocks][4], SmemTile<columns>& tile,
                                                    const FragmentPairs<>& pairs) {
    constexpr auto kEpsilon = static_cast<float>(kNormEpsilon);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float squares = 0, along = 0;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 row = cuda::unpack<Scalar>(pairs.at(tile, n, half));
        squares = fmaf(row.x, row.x, fmaf(row.y, row.y, squares));
        along = fmaf(row.x, d[n][2 * half], fmaf(row.y, d[n][2 * half + 1], along));
      }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        squares += __shfl_xor_sync(kAllLanes, squares, distance);
        along += __shfl_xor_sync(kAllLanes, along, distance);
      }
      const float of_row = -__fdividef(along, squares + kEpsilon);
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 row = cuda::unpack<Scalar>(pairs.at(tile, n, half));
        d[n][2 * half] = fmaf(of_row, row.x, d[n][2 * half]);
        d[n][2 * half + 1] = fmaf(of_row, row.y, d[n][2 * half + 1]);
      }
    }
  }

  // The rows of q (`are_queries`) are those of the last updates of each step.
  __device__ __forceinline__ void write_fp32_rows(const ChunkOfHead& at, const RowsView& view, int key_head, bool are_queries,
                                                  const float (&d)[kColumnBlocks][4], const FragmentLane& lane) const {
    const int log2_updates = are_queries ? p.log2_updates : 0;
    float* const first = first_row<float>(at, view, key_head, are_queries);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half, column = 2 * lane.pair;
      const bool has_row = row < at.steps() && (!are_queries || is_last_update(p, row));
      float* const target = first + (row >> log2_updates) * view.stride_step + column;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        if (has_row && 8 * n + column < p.dstate) {
          *reinterpret_cast<float2*>(target + 8 * n) = {d[n][2 * half], d[n][2 * half + 1]};
        }
      }
    }
  }

  // Copies the rows of a tile that TMA cannot: of a chunk that ends within its tile, where those of the next packed sequence
  // follow; in the opposite order; or of q with several updates a step. By a warpgroup.
  __device__ __forceinline__ void copy_rows(const ChunkOfHead& at, const RowsView& view, int key_head, bool are_queries,
                                            SmemTile<columns>& tile) const {
    constexpr int kVectors = columns / kRowElements;
    const int log2_updates = are_queries ? p.log2_updates : 0;
    Scalar* const target = first_row<Scalar>(at, view, key_head, are_queries);
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroupThreads; i < (at.steps() >> log2_updates) * kVectors; i += kWarpgroupThreads) {
      const int row = i / kVectors, vector = i % kVectors, last_update = ((row + 1) << log2_updates) - 1;
      if (vector * kRowElements < p.dstate) {
        *reinterpret_cast<uint4*>(target + row * view.stride_step + vector * kRowElements) = *tile.vector(last_update, vector);
      }
    }
  }

  // Takes the diagonal of dv E^T.
  static __device__ __forceinline__ void put_diagonal(const float (&products)[kStepBlocks][4], float (&target)[kChunk],
                                                      const FragmentLane& lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
        const float (&block)[4] = products[2 * warp + half];
        if (lane.warp == warp) sum = lane.quad % 2 == 0 ? block[2 * half] : block[2 * half + 1];
      }
      if (lane.pair == lane.quad / 2) target[lane.row + 8 * half] = sum;
    }
  }
  // The gradients of betas that are not small: the diagonal of dv E^T, divided by beta. By a warp.
  __device__ __forceinline__ void write_betas(const ChunkOfHead& at, const BetaSums& sums, const BwdTables& tables,
                                              const FragmentLane& lane) const {
    float2 sum = reinterpret_cast<const float2*>(sums.products)[lane.index];
    if constexpr (kHasLowBits<Scalar>) {
#pragma unroll
      for (const auto& of_rows : sums.low_bits) {
        const float2 low = __bfloat1622float2(of_rows[lane.index]);
        sum.x = fmaf(LowBitSums::kUnit, low.x, sum.x);
        sum.y = fmaf(LowBitSums::kUnit, low.y, sum.y);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * lane.index + i;
      const float beta = tables.beta[step];
      if (step < at.steps() && !is_small_beta<Scalar>(beta)) put_beta(at, step, __fdividef(i == 0 ? sum.x : sum.y, beta));
    }
  }
  // The other betas, from Y and E in memory. By a warpgroup.
  template <int state_columns>
  __device__ __forceinline__ void write_small_betas(const ChunkOfHead& at, const BwdTables& tables,
                                                    const FragmentLane& lane) const {
#pragma unroll 1
    for (int step = lane.warp; step < at.steps(); step += kWarpgroupWarps) {
      if (!is_small_beta<Scalar>(tables.beta[step])) continue;
      const auto element = [&](SmemTile<kChunk>& tile, int row) {
        return cuda::to_accumulate(reinterpret_cast<const Scalar*>(tile.vector(row, step / kRowElements))[step % kRowElements]);
      };
      float sum = 0;
#pragma unroll 1
      for (int row = lane.index; row < p.headdim; row += kWarpSize) {
        auto& states = *states_of_chunk<state_columns>(p, at.number, at.head, row / kStateRows);
        sum = fmaf(element(states.y, row % kStateRows), element(states.e, row % kStateRows), sum);
      }
      sum = cuda::sum_over_warp(sum);
      if (lane.index == 0) put_beta(at, step, sum);
    }
  }

 private:
  template <typename Element>
  __device__ __forceinline__ Element* first_row(const ChunkOfHead& at, const RowsView& view, int key_head,
                                                bool are_queries) const {
    return are_queries ? step_rows<Element>(p, at, view, key_head, at.chunk)
                       : at.template rows<Element>(view, key_head, at.chunk);
  }
  __device__ __forceinline__ void put_beta(const ChunkOfHead& at, int step, float value) const {
    const auto target = [&](auto type) {
      return at.template rows<decltype(type)>(p.grad_beta, at.head, at.chunk) + step * p.grad_beta.stride_step;
    };
    if (p.rounds_grad_beta) {
      *target(Scalar()) = cuda::from_accumulate<Scalar>(value);
    } else {
      *target(float()) = value;
    }
  }
};

}  // namespace ssm_kernels::delta_rule
