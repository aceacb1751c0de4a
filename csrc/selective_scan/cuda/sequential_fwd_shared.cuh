// Selective scan, forward, on CUDA, sequential: a block's shared memory.
#pragma once

#include "selective_scan/cuda/sequential_tile.cuh"

namespace ssm_kernels::selective_scan::sequential {

template <typename TileConfig>
struct alignas(kVectorBytes) FwdShared {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  // Padding of two groups of steps: state lanes that store at the same time use different banks.
  static constexpr int kArray = TileArray<TileConfig>::kCapacity + 2 * kGroupSteps;
  static constexpr int kBuffers = 2;
  // Stages of raw tiles: one in conversion and one in flight; a third for u, which write() reads again. Gates are read a tile
  // later.
  static constexpr int kStages = 2, kStagesOfU = 3;
  using RawVector = typename ThreadVectors<TileConfig, false>::Raw;
  using RawMatrix = typename Matrices<TileConfig>::Raw;
  static constexpr int kStage = ThreadVectors<TileConfig, false>::kCount * TileConfig::kProducers;
  static constexpr int kMatrixStage = Matrices<TileConfig>::kCount * TileConfig::kProducers;

  static constexpr int kMatrix = Matrices<TileConfig>::kCapacity;

  Position position;
  FwdRows<Scalar> rows;
  // Threads read arrays in vectors.
  alignas(kVectorBytes) Acc skip[kTileChannels], bias[kTileChannels];
  RawVector u[kStagesOfU * kStage], delta_raw[kStages * kStage];
  RawMatrix raw_matrices[kStages * kMatrixStage];
  alignas(kVectorBytes) Acc matrix_arrays[kBuffers * 2 * kMatrix];  // (buffers, B and C)
  alignas(kVectorBytes)
      Acc arrays[kBuffers * 4 * kArray];  // (buffers, delta and delta_u), then (buffers, partial sums of two state lanes)
  RawVector z[kStages * kStage];          // allocated for calls with gates only

  static int64_t bytes(bool has_gate) { return sizeof(FwdShared) - (has_gate ? 0 : sizeof(z)); }

  __device__ __forceinline__ TileArray<TileConfig> delta(int tile) { return {arrays + tile % kBuffers * 2 * kArray}; }
  __device__ __forceinline__ TileArray<TileConfig> delta_u(int tile) { return {arrays + (tile % kBuffers * 2 + 1) * kArray}; }
  // A state lane's partial sums: those of two lanes overwrite delta and delta u. The four array numbers differ modulo four, so
  // that the lanes' banks differ.
  __device__ __forceinline__ TileArray<TileConfig> part(int tile, int state_lane) {
    const int buffer = tile % kBuffers;
    return {arrays + (state_lane < 2 ? buffer * 2 + state_lane : 4 + (1 - buffer) * 2 + state_lane - 2) * kArray};
  }
  __device__ __forceinline__ Matrices<TileConfig> matrices(int tile) {
    Acc* const B = matrix_arrays + tile % kBuffers * 2 * kMatrix;
    return {B, B + kMatrix};
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
