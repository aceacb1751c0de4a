// Selective scan, backward, on CUDA, sequential: a block's shared memory.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "selective_scan/cuda/sequential_matrix.cuh"
#include "selective_scan/cuda/sequential_tile.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"

namespace ssm_kernels::selective_scan::sequential {

// The arrays in a block's shared memory. Methods that read two samples have a fourth array of a tile, and the warps' sums then
// take the place of states before groups that have been read: two_sample_sequential_bwd.cuh says how.
template <typename TileConfig, bool two_samples = false>
struct BwdShared {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using LaneStates = Vector<Acc, kLaneStates>;
  static constexpr int kArray = TileArray<TileConfig>::kCapacity;
  static constexpr int kBuffers = 2;
  static constexpr int kChannelSums = 2 * kProducerWarps * kTileChannels;
  static constexpr int kGroups = TileConfig::kTileSteps / kGroupSteps;
  // A warp's sums for the gradients of B and C: (2, kStates, steps).
  static constexpr int kSumsPitch = TileConfig::kTileSteps + kGroupSteps;
  static constexpr int kSums = 2 * kStates * kSumsPitch;
  static constexpr int kArrays = two_samples ? 4 : 3;  // of a tile

  Position* position;
  BwdRows<Scalar>* rows;
  cuda::Mbarrier* sums_are_read;  // by the consumers
  Acc *skip, *bias;
  Acc* channel_sums;   // of the gradients of D and of delta_bias: (2, producer warps, channels)
  Acc* matrix_arrays;  // (buffers, B and C)
  Acc* arrays;         // (buffers, delta and input and dy)
  LaneStates* states;  // before each group: (groups, channels of a lane, consumer threads)
  Acc* sums;           // (consumer warps, kSums)
  Acc* u_before;       // (buffers, channels): u before a tile. B before a tile is in the padding before a state's row
  int64_t bytes;

  SSM_HOST_DEVICE explicit BwdShared(unsigned char* memory) {
    SharedAllocator shared(memory);
    position = shared.allocate<Position>(1);
    rows = shared.allocate<BwdRows<Scalar>>(1);
    sums_are_read = shared.allocate<cuda::Mbarrier>(1);
    skip = shared.allocate<Acc>(kTileChannels);
    bias = shared.allocate<Acc>(kTileChannels);
    channel_sums = shared.allocate<Acc>(kChannelSums);
    u_before = two_samples ? shared.allocate<Acc>(kBuffers * kTileChannels + kGroupSteps) : nullptr;
    matrix_arrays = shared.allocate<Acc>(kBuffers * 2 * Matrices<TileConfig>::kCapacity);
    arrays = shared.allocate<Acc>(kBuffers * kArrays * kArray);
    states = shared.allocate<LaneStates>(kGroups * kLaneChannels * TileConfig::kConsumers);
    sums = two_samples ? nullptr : shared.allocate<Acc>(kConsumerWarps * kSums);
    bytes = shared.bytes();
  }
  // The values of a tile, and the sums over states that overwrite them: y, and the sums `input` and `step` of GradientSums.
  static constexpr int kDelta = 0, kInput = 1, kDy = 2;
  static constexpr int kY = 0, kStep = 2;
  // The weight of two samples, and the gradient of lam, which overwrites it.
  static constexpr int kWeight = 3;
  __device__ __forceinline__ TileArray<TileConfig> delta(int tile) const { return array(tile, kDelta); }
  __device__ __forceinline__ TileArray<TileConfig> input(int tile) const { return array(tile, kInput); }
  __device__ __forceinline__ TileArray<TileConfig> dy(int tile) const { return array(tile, kDy); }
  __device__ __forceinline__ Matrices<TileConfig> matrices(int tile) const {
    Acc* const B = matrix_arrays + tile % kBuffers * 2 * Matrices<TileConfig>::kCapacity;
    return {B, B + Matrices<TileConfig>::kCapacity};
  }
  __device__ __forceinline__ TileArray<TileConfig> array(int tile, int i) const {
    return {arrays + (tile % kBuffers * kArrays + i) * kArray};
  }
};

// The first step of the block's last tile, where backward starts.
template <typename TileConfig>
__device__ __forceinline__ int64_t last_tile(const Position& at) {
  return at.begin + (at.end - at.begin - 1) / TileConfig::kTileSteps * TileConfig::kTileSteps;
}

}  // namespace ssm_kernels::selective_scan::sequential
