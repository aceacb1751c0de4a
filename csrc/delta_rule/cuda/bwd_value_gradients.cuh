// The gradients of v, diag(beta) Y, which the kernels of backward's states write (bwd_states.cuh, bwd_wide_states.cuh): a
// warpgroup has Y^T of 64 rows of V as accumulators, of which columns are steps. The last kernel reads them instead of Y.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
struct ValueGradients {
  using Steps = float[kStepBlocks][4];

  const DeltaRuleBwdParams& p;
  const StateTile& state_tile;
  int index;  // of the warpgroup
  const FragmentLane& lane;

  // The rows of `tile` are steps.
  __device__ __forceinline__ void put(SmemTile<kChunk>& tile, const Steps& y, const BwdTables& tables) const {
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) {
      uint32_t rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * j + i / 2, half = i % 2;
        const float2 beta = column_pair(tables.beta, n, lane);
        rows[i] = cuda::pack<Scalar>(beta.x * y[n][2 * half], beta.y * y[n][2 * half + 1]);
      }
      cuda::stmatrix_transposed(tile.ldmatrix_row(16 * j, 2 * lane.warp, lane.index), rows);
    }
  }
  // Starts the copy of a tile of whole chunks of one head, which the warpgroup has published.
  __device__ __forceinline__ void send(const SmemTile<kChunk>& tile, const WorkSpan& at, int chunk, bool starts) const {
    cuda::tma_store_tile(p.grad_v_descriptor, state_tile.first_row, at.group, static_cast<int>(at.start) + chunk * kChunk,
                         static_cast<int>(at.batch), &tile, starts);
  }
  // Writes the tile of a chunk that ends within it, where the rows of the next packed sequence follow. `tile` is free.
  __device__ __forceinline__ void write_cut(SmemTile<kChunk>& tile, const Steps& y, const BwdTables& tables, const WorkSpan& at,
                                            int chunk) const {
    constexpr int kVectors = kChunk / kRowElements;
    put(tile, y, tables);
    sync_warpgroup(index);
    Scalar* const target = at.template rows<Scalar>(p.grad_v, at.group, chunk) + state_tile.first_row;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroupThreads; i < at.steps_of(chunk) * kVectors; i += kWarpgroupThreads) {
      const int row = i / kVectors, vector = i % kVectors;
      if (vector * kRowElements < state_tile.rows) {
        *reinterpret_cast<uint4*>(target + row * p.grad_v.stride_step + vector * kRowElements) = *tile.vector(row, vector);
      }
    }
    sync_warpgroup(index);
  }
  // Writes Y^T of a chunk with a small beta to the workspace. `tile` is free, once TMA has read what it held.
  __device__ __forceinline__ void write_undivided(SmemTile<kChunk>& target, SmemTile<kChunk>& tile, const Steps& y,
                                                  const FragmentPairs<>& pairs) const {
    cuda::tma_store_wait_read<0>();
    sync_warpgroup(index);
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) pairs.at(tile, n, half) = cuda::pack<Scalar>(y[n][2 * half], y[n][2 * half + 1]);
    }
    cuda::fence_proxy_async();
    sync_warpgroup(index);
    cuda::tma_store(&target, &tile, sizeof(tile), threadIdx.x % kWarpgroupThreads == 0 && state_tile.is_there());
  }
};

}  // namespace ssm_kernels::delta_rule
