// Accumulator fragments of tensor-core products as cuda/ptx/mma_sm80.cuh and cuda/ptx/wgmma_sm90.cuh distribute them: a warp
// has 16 rows; a lane has two of them, `row` and row + 8, and in each block of 8 columns two, 2 pair and 2 pair + 1.
#pragma once

#include <type_traits>

#include "cuda/constants.h"
#include "cuda/smem_tile.cuh"

namespace ssm_kernels::cuda {

// A lane among its unit's.
struct FragmentLane {
  int index;  // of the warp's
  int quad, pair;
  int warp;
  int row;  // of the unit's

  __device__ __forceinline__ FragmentLane() : FragmentLane(threadIdx.x % kWarpSize) {}
  // The compiler does not ask for the thread's index again wherever registers are few: that takes longer than what it is for.
  static __device__ __forceinline__ FragmentLane opaque_thread() {
    int index = threadIdx.x % kWarpSize;
    asm volatile("" : "+r"(index));
    return FragmentLane(index);
  }
  // The same; what follows from its index is computed again rather than kept in registers.
  __device__ __forceinline__ FragmentLane opaque() const {
    FragmentLane result = *this;
    asm volatile("" : "+r"(result.index));
    result.quad = result.index / 4;
    result.pair = result.index % 4;
    result.row = 16 * warp + result.quad;
    return result;
  }

 private:
  __device__ __forceinline__ explicit FragmentLane(int index) : index(index), quad(index / 4), pair(index % 4) {
    // By a shuffle the compiler sees that it is the same for all lanes.
    warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpSize, 0);
    row = 16 * warp + quad;
  }
};

// A lane's pairs of neighboring elements of a tile: in row lane.row + 8 half, of each block of 8 columns those that a product
// would give it.
template <int element_bytes = 2>
class FragmentPairs {
 public:
  using Pair = std::conditional_t<element_bytes == 2, uint32_t, float2>;

  __device__ __forceinline__ explicit FragmentPairs(const FragmentLane& lane)
      : offset_(lane.row * kRowBytes + (lane.pair * sizeof(Pair) ^ swizzle<element_bytes>(lane.quad) * sizeof(uint4))) {}

  // The same; what follows from it is computed again rather than kept in registers.
  __device__ __forceinline__ FragmentPairs opaque() const {
    FragmentPairs result = *this;
    asm volatile("" : "+r"(result.offset_));
    return result;
  }
  // The same of blocks that many further, of the same 8.
  __device__ __forceinline__ FragmentPairs moved(int blocks) const {
    FragmentPairs result = *this;
    result.offset_ ^= blocks * kBlockBytes;
    return result;
  }

  template <int columns>
  __device__ __forceinline__ Pair& at(SmemTile<columns, element_bytes>& tile, int block, int half) const {
    constexpr int kBlocksOfPanel = kRowBytes / kBlockBytes;
    const int place = (offset_ ^ (block % kBlocksOfPanel * kBlockBytes)) + block / kBlocksOfPanel * (kTileRows * kRowBytes) +
                      half * 8 * kRowBytes;
    return *reinterpret_cast<Pair*>(reinterpret_cast<unsigned char*>(&tile) + place);
  }

 private:
  static constexpr int kRowBytes = SmemTile<kTileRows, element_bytes>::kRowBytes, kBlockBytes = 8 * element_bytes;

  int offset_;
};

}  // namespace ssm_kernels::cuda
