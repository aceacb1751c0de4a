// Fragments of tensor-core accumulators, distributed over lanes as in cuda/ptx/mma_sm80.cuh and cuda/ptx/wgmma_sm90.cuh. A warp
// holds 16 rows. A lane holds two of them, `row` and row + 8, and of each block of 8 columns the two columns 2 pair and 2 pair
// + 1.
#pragma once

#include <type_traits>

#include "cuda/constants.h"
#include "cuda/opaque.cuh"
#include "cuda/smem_tile.cuh"

namespace ssm_kernels::cuda {

// A lane of a warpgroup.
struct FragmentLane {
  int index;  // in the warp
  int quad, pair;
  int warp;
  int row;  // of the warpgroup's 64 rows

  __device__ __forceinline__ FragmentLane() : FragmentLane(threadIdx.x % kWarpSize) {}
  // Keeps the lane's index in a register. Under register pressure the compiler would read the special register again and again,
  // which takes longer (about 20 cycles) than the work that needs it.
  static __device__ __forceinline__ FragmentLane opaque_thread() {
    return FragmentLane(cuda::opaque(static_cast<int>(threadIdx.x % kWarpSize)));
  }
  // The same lane; the compiler recomputes what follows from its index instead of keeping it in registers.
  __device__ __forceinline__ FragmentLane opaque() const {
    FragmentLane result = *this;
    result.index = cuda::opaque(index);
    result.quad = result.index / 4;
    result.pair = result.index % 4;
    result.row = 16 * warp + result.quad;
    return result;
  }

 private:
  __device__ __forceinline__ explicit FragmentLane(int index) : index(index), quad(index / 4), pair(index % 4) {
    // The shuffle tells the compiler that all lanes have the same value.
    warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpSize, 0);
    row = 16 * warp + quad;
  }
};

// Pairs of neighboring elements of a tile, where an accumulator fragment has them: in row lane.row + 8 half, the two columns of
// the lane in each block of 8.
template <int element_bytes = 2>
class FragmentPairs {
 public:
  using Pair = std::conditional_t<element_bytes == 2, uint32_t, float2>;

  __device__ __forceinline__ explicit FragmentPairs(const FragmentLane& lane)
      : offset_(lane.row * kRowBytes + (lane.pair * sizeof(Pair) ^ swizzle<element_bytes>(lane.quad) * sizeof(uint4))) {}

  // The same pairs; the compiler recomputes what follows from their offset instead of keeping it in registers.
  __device__ __forceinline__ FragmentPairs opaque() const {
    FragmentPairs result = *this;
    result.offset_ = cuda::opaque(offset_);
    return result;
  }
  // Shifts all blocks by `blocks`, within a panel. The shift is an XOR: it and the blocks use different bits.
  __device__ __forceinline__ FragmentPairs moved(int blocks) const {
    FragmentPairs result = *this;
    result.offset_ ^= blocks * kBlockBytes;
    return result;
  }

  template <int columns>
  __device__ __forceinline__ Pair& at(SmemTile<columns, element_bytes>& tile, int block, int half) const {
    constexpr int kBlocksOfPanel = kRowBytes / kBlockBytes;
    const int offset = (offset_ ^ (block % kBlocksOfPanel * kBlockBytes)) + block / kBlocksOfPanel * (kTileRows * kRowBytes) +
                       half * 8 * kRowBytes;
    return *reinterpret_cast<Pair*>(reinterpret_cast<unsigned char*>(&tile) + offset);
  }

 private:
  static constexpr int kRowBytes = SmemTile<kTileRows, element_bytes>::kRowBytes, kBlockBytes = 8 * element_bytes;

  int offset_;
};

}  // namespace ssm_kernels::cuda
