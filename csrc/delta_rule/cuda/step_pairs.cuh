// Matrices of pairs of a chunk's steps: products of keys, or of queries and keys, times the decays between the steps. A warp
// holds 16 rows as accumulators (cuda/fragment.cuh).
#pragma once

#include <type_traits>

#include "cuda/chunked/chunk_tables.cuh"
#include "delta_rule/cuda/toolkit.cuh"

namespace ssm_kernels::delta_rule {

// With factors r of keys and s of queries (step_tables.cuh) `gain` is r, `exp_cumsum` and `gain_to_chunk_end` have the factor
// r, and `log2_cumsum` is less log2 r.
struct ScanTables : ChunkTables {
  alignas(16) float query_factor[kChunk];  // scale s r
  float query_decay[kChunk];               // scale s times the decay from before the chunk to the step
};
struct DeltaRuleTables : ScanTables {
  float beta[kChunk];
};

// The factor of row `row` in products of keys.
__device__ __forceinline__ float key_row_factor(const ChunkTables& tables, int row, float beta) {
  return beta * (tables.gain[row] * tables.gain[row]);
}

// Calls body with the number of the warp as a constant: warps have different blocks of the matrices. Products of the warpgroup
// are outside, because all of its warps execute the same ones.
template <typename Body>
__device__ __forceinline__ void visit_warp(const FragmentLane& lane, const Body& body) {
  if (lane.warp == 0) body(std::integral_constant<int, 0>());
  if (lane.warp == 1) body(std::integral_constant<int, 1>());
  if (lane.warp == 2) body(std::integral_constant<int, 2>());
  if (lane.warp == 3) body(std::integral_constant<int, 3>());
}

// The values of a lane's two steps in a block of columns.
__device__ __forceinline__ float2 column_pair(const StepTable& table, int block, const FragmentLane& lane) {
  return *reinterpret_cast<const float2*>(&table[kBlockSteps * block + 2 * lane.pair]);
}

// The products of a chunk's rows with its keys, of which rows are steps: (64, 64), by one warpgroup.
template <typename Scalar, int columns>
__device__ __forceinline__ void multiply_by_keys(const SmemTile<columns>& rows, const SmemTile<columns>& keys,
                                                 float (&products)[kStepBlocks][4]) {
  const uint64_t row_operand = make_operand(rows), key_operand = make_operand(keys);
  cuda::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < columns / 16; ++k) {
    cuda::gemm<Scalar, false, false>(products, columns_of(row_operand, k), columns_of(key_operand, k), k > 0);
  }
  cuda::warpgroup_commit();
  cuda::warpgroup_wait<0>(products);
}

// Multiplies by the decays between the steps of the warp's rows and those of columns up to its diagonal block, and by factors
// of the lane's rows. Left of the diagonal block a decay is the product of those from the column to the warp's first row, and
// from there to the row: neither exceeds 1, factors of keys apart. Elements above the diagonal become zero, and on it unless
// has_diagonal.
template <int warp, bool has_diagonal, typename Params>
__device__ __forceinline__ void apply_decays(const Params& p, float (&products)[kStepBlocks][4], const float (&factors)[2],
                                             const ChunkTables& tables, const FragmentLane& lane) {
  const float log2_of_first = tables.log2_cumsum[16 * warp];
  float log2_of_row[2], rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    log2_of_row[half] = tables.log2_cumsum[lane.row + 8 * half];
    rows[half] = factors[half] * Math<float>::exp2(log2_of_row[half] - log2_of_first);
  }
#pragma unroll
  for (int n = 0; n < 2 * warp; ++n) {
    const float2 log2 = column_pair(tables.log2_cumsum, n, lane);
    const float of_columns[2] = {Math<float>::exp2(log2_of_first - log2.x), Math<float>::exp2(log2_of_first - log2.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) products[n][i] *= rows[i / 2] * of_columns[i % 2];
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 log2 = column_pair(tables.log2_cumsum, 2 * warp + n, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int distance = lane.quad + 8 * (i / 2) - (8 * n + 2 * lane.pair + i % 2);
      float& product = products[2 * warp + n][i];
      // Above the diagonal the decay may be Inf: it is selected.
      const float decay = factors[i / 2] * Math<float>::exp2(log2_of_row[i / 2] - (i % 2 == 0 ? log2.x : log2.y));
      product = (has_diagonal ? distance >= 0 : distance > 0) ? product * decay : 0.0f;
    }
  }
  if (!has_reset(p, tables)) return;
#pragma unroll
  for (int n = 0; n < 2 * warp + 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kBlockSteps * n + 2 * lane.pair + i % 2 < tables.first[lane.row + 8 * (i / 2)]) products[n][i] = 0;
    }
  }
}

// Clears the steps from `steps` on of tiles whose rows are steps: their values belong to the next packed sequence and may be
// NaN. By one warpgroup; a barrier of it must follow.
template <int panels>
__device__ __forceinline__ void clear_steps(uint4 (&tile)[panels][cuda::kTileRows][8], int steps) {
  for (int row = steps + static_cast<int>(threadIdx.x % kWarpgroupThreads) / 8; row < kChunk; row += kWarpgroupThreads / 8) {
#pragma unroll
    for (auto& panel : tile) panel[row][threadIdx.x % 8] = {0, 0, 0, 0};
  }
  cuda::fence_proxy_async();
}

}  // namespace ssm_kernels::delta_rule
