// The epilogue of forward on compute capability 9.0. A chunk's tile of out leaves shared memory by one TMA store, which runs
// beside everything else. Stores from registers would occupy these for as long as they wait behind the loads of later chunks.
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

  // TMA does not write the part of the tile that is outside of the tensor.
  __device__ __forceinline__ void send(const SmemTile<kStateRows>& tile, int chunk) const {
    cuda::tma_store_tile(p_.out_descriptor, state_tile_.first_row, state_tile_.head,
                         static_cast<int>(at_.start) + chunk * kChunk, static_cast<int>(at_.batch), &tile,
                         state_tile_.is_there() && thread() == 0);
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
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const SsdFwdParams& p_;
  float2 D_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

}  // namespace ssm_kernels::ssd
