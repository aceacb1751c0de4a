// Selective scan, forward, on CUDA: what the two roles of a block's warps share, its shared memory.
#pragma once

#include "selective_scan/cuda/sequential_tile.cuh"

namespace ssm_kernels::selective_scan::sequential {

// The arrays in a block's shared memory.
template <typename TileConfig>
struct FwdShared {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  // Apart by two groups of steps in banks, for state lanes that write beside each other.
  static constexpr int kArray = TileArray<TileConfig>::kCapacity + 2 * kGroupSteps;
  static constexpr int kBuffers = 2;
  // Tiles as they were read: one that is put into place and one under way; of u also one that is written out. Gates are read a
  // tile later.
  static constexpr int kStages = 2, kStagesOfU = 3;
  using RawVector = typename ThreadVectors<TileConfig, false>::Raw;
  using RawMatrix = typename Matrices<TileConfig>::Raw;
  static constexpr int kStage = ThreadVectors<TileConfig, false>::kCount * TileConfig::kProducers;
  static constexpr int kMatrixStage = Matrices<TileConfig>::kCount * TileConfig::kProducers;

  Position* position;
  FwdRows<Scalar>* rows;
  Acc *skip, *bias;
  RawVector *u, *delta_raw, *z;  // (stages, kStage)
  RawMatrix* raw_matrices;       // (stages, kMatrixStage)
  Acc* matrix_arrays;            // (buffers, B and C)
  Acc* arrays;                   // (buffers, delta and delta_u), then (buffers, the parts of two state lanes)
  size_t bytes;

  SSM_HOST_DEVICE FwdShared(unsigned char* memory, const SelectiveScanFwdParams& p) {
    Carver carver(memory);
    position = carver.take<Position>(1);
    rows = carver.take<FwdRows<Scalar>>(1);
    skip = carver.take<Acc>(kTileChannels);
    bias = carver.take<Acc>(kTileChannels);
    u = carver.take<RawVector>(kStagesOfU * kStage);
    delta_raw = carver.take<RawVector>(kStages * kStage);
    raw_matrices = carver.take<RawMatrix>(kStages * kMatrixStage);
    matrix_arrays = carver.take<Acc>(kBuffers * 2 * Matrices<TileConfig>::kCapacity);
    arrays = carver.take<Acc>(kBuffers * 4 * kArray);
    z = carver.take<RawVector>(p.z.data != nullptr ? kStages * kStage : 0);
    bytes = carver.bytes();
  }
  __device__ __forceinline__ TileArray<TileConfig> delta(int tile) const { return {arrays + tile % kBuffers * 2 * kArray}; }
  __device__ __forceinline__ TileArray<TileConfig> delta_u(int tile) const {
    return {arrays + (tile % kBuffers * 2 + 1) * kArray};
  }
  // Of two state lanes in the place of delta and delta u. In either buffer the four are different modulo four.
  __device__ __forceinline__ TileArray<TileConfig> part(int tile, int state_lane) const {
    const int buffer = tile % kBuffers;
    return {arrays + (state_lane < 2 ? buffer * 2 + state_lane : 4 + (1 - buffer) * 2 + state_lane - 2) * kArray};
  }
  __device__ __forceinline__ Matrices<TileConfig> matrices(int tile) const {
    Acc* const B = matrix_arrays + tile % kBuffers * 2 * Matrices<TileConfig>::kCapacity;
    return {B, B + Matrices<TileConfig>::kCapacity};
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
