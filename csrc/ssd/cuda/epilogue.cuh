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
  __device__ __forceinline__ void store_rows(SmemTile<kStateRows>& tile, int chunk, const FragmentLane& lane) const {
    const int pair = lane.index % kLanesOfRow, column = 16 * lane.warp + 2 * pair, row = lane.index / kLanesOfRow * 2;
    const int count = state_tile_.rows - column, steps = count > 0 ? at_.steps_of(chunk) : 0;
    Scalar* target =
        at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + state_tile_.first_row + column + row * p_.out.stride_step;
    const auto word = [&](int i) {
      return reinterpret_cast<const uint32_t*>(tile.vector(row + i, 2 * lane.warp + pair / 4))[pair % 4];
    };
    constexpr int kRowsOfBlock = 8;
    __syncwarp();
    if (p_.out_has_pairs) {
#pragma unroll
      for (int i = 0; i < kChunk; i += kRowsOfBlock) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t value = word(i + odd);
          if (row + i + odd < steps) __stcg(reinterpret_cast<uint32_t*>(target + odd * p_.out.stride_step), value);
        }
        target += kRowsOfBlock * p_.out.stride_step;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kChunk; i += i % 2 == 0 ? 1 : kRowsOfBlock - 1) {
      store_pair(target, word(i), pair, row + i < steps ? count : 0);
      target += (i % 2 == 0 ? 1 : kRowsOfBlock - 1) * p_.out.stride_step;
    }
  }
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
  static constexpr int kLanesOfRow = 8;

  // Stores a lane's pair of a row that begins at any element and has `count` of them from the pair on, possibly 0 or fewer,
  // with the other lanes of the row. Where the pair is between words, the lane stores its second element and the next lane's
  // first.
  static __device__ __forceinline__ void store_pair(Scalar* target, uint32_t word, int pair, int count) {
    const uint32_t next = __shfl_down_sync(kAllLanes, word, 1);
    if (count <= 0) return;
    auto* const halves = reinterpret_cast<unsigned short*>(target);
    const auto low = static_cast<unsigned short>(word), high = static_cast<unsigned short>(word >> 16);
    if (reinterpret_cast<uintptr_t>(target) % sizeof(word) == 0) {
      if (count > 1) {
        __stcg(reinterpret_cast<uint32_t*>(target), word);
      } else {
        halves[0] = low;
      }
      return;
    }
    if (pair == 0) halves[0] = low;
    if (pair < kLanesOfRow - 1 && count > 2) {
      __stcg(reinterpret_cast<uint32_t*>(halves + 1), __byte_perm(word, next, 0x5432));
    } else if (count > 1) {
      halves[1] = high;
    }
  }
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const SsdFwdParams& p_;
  float2 D_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

}  // namespace ssm_kernels::ssd
