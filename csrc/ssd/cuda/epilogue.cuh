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
  // Instead of send(), after write() and a barrier of the warpgroup, for rows of out without vectors. A warp stores 16 rows,
  // one after another, a lane a pair of elements: few memory lines at once.
  __device__ __forceinline__ void store_rows(SmemTile<kStateRows>& tile, int chunk) const {
    const FragmentLane lane = FragmentLane::opaque_thread();  // so that no address is kept through the loop over chunks
    constexpr int kRows = kChunk / kWarpgroupWarps;
    const int first = lane.warp * kRows, rows = at_.steps_of(chunk) - first, count = state_tile_.rows - 2 * lane.index;
    Scalar* target = at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + state_tile_.first_row + 2 * lane.index +
                     first * p_.out.stride_step;
#pragma unroll 2
    for (int i = 0; i < kRows; ++i) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(tile.vector(first + i, lane.index / 4))[lane.index % 4];
      if (!p_.out_has_pairs) {
        store_pair(target, word, lane.index, i < rows ? count : 0);
      } else if (i < rows && count > 0) {
        __stcg(reinterpret_cast<uint32_t*>(target), word);
      }
      target += p_.out.stride_step;
    }
  }
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
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
    if (pair < cuda::kWarpSize - 1 && count > 2) {
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
