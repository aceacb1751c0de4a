// The epilogue of forward on compute capability 9.0. A chunk's tile of out leaves shared memory by one TMA store, which runs
// beside everything else. Stores from registers would occupy these for as long as they wait behind the loads of later chunks.
//
// A TMA store begins at a vector of 16 bytes. Where a head begins between vectors (StateTile), threads store its up to 7
// elements before the first vector. The tensor that the TMA descriptor describes begins after these, so that the store, which
// begins with the tile's first vector, does not write the head before.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "ssd/cuda/state.cuh"

namespace ssm_kernels::ssd {

// Called by all threads of a consumer warpgroup. For each chunk of a segment: write(), a barrier of the warpgroup, then send(),
// or for the segment's last chunk send_last() with no wgmma in flight. Before the next write(): wait_for_sent() and a barrier.
// At the end of the kernel: wait_for_sent(). may_shift_heads: whether p.head_shift may be other than 0; send() then needs
// store_begin() besides.
template <typename Scalar, typename Order, bool may_shift_heads>
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

  // TMA does not write the part of the tile that is outside of the tensor.
  __device__ __forceinline__ void send(const SmemTile<kStateRows>& tile, int chunk) const {
    const cuda::TmaDescriptor* descriptor = p_.out_descriptors;
    int head = state_tile_.head, first_row = state_tile_.first_row;
    if constexpr (may_shift_heads) {
      descriptor += head & ((1 << p_.log2_descriptors) - 1);
      head >>= p_.log2_descriptors;
      first_row &= -kRowElements;
    }
    cuda::tma_store_tile(*descriptor, first_row, head, static_cast<int>(at_.start) + chunk * kChunk,
                         static_cast<int>(at_.batch), &tile, state_tile_.is_there() && thread() == 0);
  }
  // Stores the head's elements before its first vector, of the first `steps` steps.
  __device__ __forceinline__ void store_begin(SmemTile<kStateRows>& tile, int chunk, int steps) const {
    if constexpr (!may_shift_heads) return;
    const int before = -state_tile_.first_row, step = thread();
    if (before <= 0 || !state_tile_.is_there() || step >= steps) return;
    const auto* const source = reinterpret_cast<const unsigned char*>(tile.vector(step, 0));
    Scalar* const vector = at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + step * p_.out.stride_step - before;
    const auto store = [&](auto word, int element) {
      using Word = decltype(word);
      __stcg(reinterpret_cast<Word*>(vector + element), *reinterpret_cast<const Word*>(source + element * sizeof(Scalar)));
    };
    const int even = (before + 1) & ~1;
    if (before % 2 != 0) store(static_cast<unsigned short>(0), before);
    if (even % 4 != 0) store(0u, even);
    if (even <= 4) store(uint2{}, 4);
  }
  // The steps after the end of a packed sequence belong to the next one, so only the sequence's own steps are stored.
  __device__ __forceinline__ void send_last(SmemTile<kStateRows>& tile) const {
    const int chunk = at_.chunks - 1, steps = at_.steps_of(chunk);
    if (!state_tile_.is_there() || chunk < 0 || steps <= 0) return;
    if (steps == kChunk || !is_packed(p_)) {
      store_begin(tile, chunk, steps);
      send(tile, chunk);
      return;
    }
    if (may_shift_heads && p_.head_shift != 0) {
      store_elements(tile, chunk, steps);
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
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
  __device__ __forceinline__ void store_elements(SmemTile<kStateRows>& tile, int chunk, int steps) const {
    Scalar* const target = at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + state_tile_.first_row;
#pragma unroll 1
    for (int i = thread(); i < steps * kStateRows; i += kWarpgroupThreads) {
      const int step = i / kStateRows, row = i % kStateRows;
      if (!state_tile_.has_row(row)) continue;
      const auto* const vector = reinterpret_cast<const Scalar*>(tile.vector(step, row / kRowElements));
      target[step * p_.out.stride_step + row] = vector[row % kRowElements];
    }
  }
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const SsdFwdParams& p_;
  float2 D_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

}  // namespace ssm_kernels::ssd
