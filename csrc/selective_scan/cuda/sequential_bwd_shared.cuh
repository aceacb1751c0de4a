// Selective scan, backward, on CUDA, sequential: a block's shared memory.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "selective_scan/cuda/sequential_tile.cuh"

namespace ssm_kernels::selective_scan::sequential {

template <typename TileConfig>
struct alignas(kVectorBytes) BwdShared {
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

  static constexpr int kMatrix = Matrices<TileConfig>::kCapacity;

  Position position;
  BwdRows<Scalar> rows;
  cuda::Mbarrier sums_are_read;  // by the consumers
  // Threads read arrays in vectors.
  alignas(kVectorBytes) Acc skip[kTileChannels], bias[kTileChannels];
  Acc channel_sums[kChannelSums];  // of the gradients of D and of delta_bias: (2, producer warps, channels)
  alignas(kVectorBytes) Acc matrix_arrays[kBuffers * 2 * kMatrix];  // (buffers, B and C)
  alignas(kVectorBytes) Acc arrays[kBuffers * 3 * kArray];          // (buffers, delta and delta_u and dy)
  // Before each group: (groups, channels of a lane, consumer threads).
  LaneStates states[kGroups * kLaneChannels * TileConfig::kConsumers];
  Acc sums[kConsumerWarps * kSums];  // (consumer warps, kSums)

  __device__ __forceinline__ TileArray<TileConfig> delta(int tile) { return array(tile, 0); }
  // u itself if the gain is not one: the gradient needs u.
  __device__ __forceinline__ TileArray<TileConfig> delta_u(int tile) { return array(tile, 1); }
  __device__ __forceinline__ TileArray<TileConfig> dy(int tile) { return array(tile, 2); }
  // Sums over states, which overwrite the three arrays above: y, p k, and A q + u p (z k)'.
  __device__ __forceinline__ TileArray<TileConfig> sum(int tile, int kind) { return array(tile, kind); }
  static constexpr int kY = 0, kInput = 1, kStep = 2;
  __device__ __forceinline__ Matrices<TileConfig> matrices(int tile) {
    Acc* const B = matrix_arrays + tile % kBuffers * 2 * kMatrix;
    return {B, B + kMatrix};
  }

 private:
  __device__ __forceinline__ TileArray<TileConfig> array(int tile, int i) {
    return {arrays + (tile % kBuffers * 3 + i) * kArray};
  }
};

// The first step of the block's last tile, where backward starts.
template <typename TileConfig>
__device__ __forceinline__ int64_t last_tile(const Position& at) {
  return at.begin + (at.end - at.begin - 1) / TileConfig::kTileSteps * TileConfig::kTileSteps;
}

}  // namespace ssm_kernels::selective_scan::sequential
