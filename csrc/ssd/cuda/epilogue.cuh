// The epilogue of forward on compute capability 9.0. A chunk's tile of out leaves shared memory by one TMA store, which runs
// beside everything else. Stores from registers would occupy these for as long as they wait behind the loads of later chunks.
// TMA stores to multiples of 16 bytes only: where rows of out begin at others, warps store pairs of elements.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "ssd/cuda/state.cuh"

namespace ssm_kernels::ssd {

// Called by all threads of a consumer warpgroup. For each chunk of a segment: write(), a barrier of the warpgroup, then send(),
// or for the segment's last chunk send_last() with no wgmma in flight. Before the next write(): wait_for_sent() and a barrier.
// At the end of the kernel: wait_for_sent().
template <typename Scalar, typename Order>
class TmaEpilogue {
 public:
  __device__ __forceinline__ TmaEpilogue(const SsdFwdParams& p, const WorkSpan& at, const StateTile& state_tile,
                                         const FragmentLane& lane)
      : p_(p), D_(load_D(p, state_tile, lane)), at_(at), state_tile_(state_tile) {}

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile,
                                        const FragmentLane& lane) const {
    round_out<Scalar, Order>(y, x, D_, z_tile, tile, lane);
    cuda::fence_proxy_async();
  }

  // TMA does not write the part of the tile that is outside of the tensor. may_have_pairs: whether out may have no vectors.
  template <bool may_have_pairs = false>
  __device__ __forceinline__ void send(const SmemTile<kStateRows>& tile, int chunk) const {
    cuda::tma_store_tile(p_.out_descriptor, state_tile_.first_row, state_tile_.head,
                         static_cast<int>(at_.start) + chunk * kChunk, static_cast<int>(at_.batch), &tile,
                         state_tile_.is_there() && thread() == 0 && (!may_have_pairs || p_.out_has_vectors));
  }
  // The steps after the end of a packed sequence belong to the next one, so only the sequence's own steps are stored.
  __device__ __forceinline__ void send_last(SmemTile<kStateRows>& tile) const {
    const int chunk = at_.chunks - 1, steps = at_.steps_of(chunk);
    if (!state_tile_.is_there() || chunk < 0 || steps <= 0) return;
    if (steps == kChunk || !is_packed(p_)) {
      send(tile, chunk);
      return;
    }
    constexpr int kVectors = SmemTile<kStateRows>::kVectors;
    Scalar* const target = at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + state_tile_.first_row;
    for (int i = thread(); i < steps * kVectors; i += kWarpgroupThreads) {
      const int row = i / kVectors, vector = i % kVectors, column = vector * SmemTile<kStateRows>::kVectorElements;
      if (column < state_tile_.rows) {
        __stcg(reinterpret_cast<uint4*>(target + row * p_.out.stride_step + column), *tile.vector(row, vector));
      }
    }
  }
  // Instead of send(), for rows of out without vectors: each warp stores the columns that it has written, as pairs of elements.
  // The rows of eight lanes each are two apart, so that the four rows are in different banks.
  __device__ __forceinline__ void store_pairs(SmemTile<kStateRows>& tile, int chunk, const FragmentLane& lane) const {
    constexpr int kLanesOfRow = 8, kRowsOfBlock = 8;
    const int pair = lane.index % kLanesOfRow, column = 16 * lane.warp + 2 * pair, row = lane.index / kLanesOfRow * 2;
    const int steps = column < state_tile_.rows ? at_.steps_of(chunk) : 0;
    Scalar* target =
        at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + state_tile_.first_row + column + row * p_.out.stride_step;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunk; i += kRowsOfBlock) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const auto* const words = reinterpret_cast<const uint32_t*>(tile.vector(row + i + odd, 2 * lane.warp + pair / 4));
        if (row + i + odd < steps) __stcg(reinterpret_cast<uint32_t*>(target + odd * p_.out.stride_step), words[pair % 4]);
      }
      target += kRowsOfBlock * p_.out.stride_step;
    }
  }
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const SsdFwdParams& p_;
  float2 D_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

}  // namespace ssm_kernels::ssd
