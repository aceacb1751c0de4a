// Selective scan, forward, on CUDA, sequential: a block's shared memory.
#pragma once

#include "selective_scan/cuda/sequential_matrix.cuh"
#include "selective_scan/cuda/sequential_tile.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"

namespace ssm_kernels::selective_scan::sequential {

// The arrays in a block's shared memory.
template <typename TileConfig>
struct FwdShared {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  // Padding of two groups of steps: state lanes that store at the same time use different banks.
  static constexpr int kArray = TileArray<TileConfig>::kCapacity + 2 * kGroupSteps;
  static constexpr int kBuffers = 2;
  // Stages of raw tiles: one in conversion and one in flight; a third for u, which write() reads again. Gates are read a tile
  // later. The raw matrices have one stage, so that two blocks fit into a multiprocessor's shared memory.
  static constexpr int kStages = 2, kStagesOfU = 3;
  using RawVector = typename ThreadVectors<TileConfig, VectorAccess::kAlongSteps>::Raw;
  using RawMatrix = typename Matrices<TileConfig>::Raw;
  static constexpr int kStage = ThreadVectors<TileConfig, VectorAccess::kAlongSteps>::kStage;

  Position* position;
  FwdRows<Scalar>* rows;
  Acc *skip, *bias;
  RawVector *u, *delta_raw, *z;  // (stages, kStage)
  RawMatrix* raw_matrices;
  Acc* matrix_arrays;  // (buffers, B and C)
  Acc* arrays;         // (buffers, delta and input), then (buffers, partial sums of two state lanes)
  int64_t bytes;

  SSM_HOST_DEVICE FwdShared(unsigned char* memory, const SelectiveScanFwdParams& p) {
    SharedAllocator shared(memory);
    position = shared.allocate<Position>(1);
    rows = shared.allocate<FwdRows<Scalar>>(1);
    skip = shared.allocate<Acc>(kTileChannels);
    bias = shared.allocate<Acc>(kTileChannels);
    u = shared.allocate<RawVector>(kStagesOfU * kStage);
    delta_raw = shared.allocate<RawVector>(kStages * kStage);
    raw_matrices = shared.allocate<RawMatrix>(Matrices<TileConfig>::kStage);
    matrix_arrays = shared.allocate<Acc>(kBuffers * 2 * Matrices<TileConfig>::kCapacity);
    arrays = shared.allocate<Acc>(kBuffers * 4 * kArray);
    z = shared.allocate<RawVector>(p.z.data != nullptr ? kStages * kStage : 0);
    bytes = shared.bytes();
  }
  __device__ __forceinline__ TileArray<TileConfig> delta(int tile) const { return {arrays + tile % kBuffers * 2 * kArray}; }
  __device__ __forceinline__ TileArray<TileConfig> input(int tile) const {
    return {arrays + (tile % kBuffers * 2 + 1) * kArray};
  }
  // A state lane's partial sums: those of two lanes overwrite delta and the input. The four array numbers differ modulo four,
  // so that the lanes' banks differ.
  __device__ __forceinline__ TileArray<TileConfig> part(int tile, int state_lane) const {
    const int buffer = tile % kBuffers;
    return {arrays + (state_lane < 2 ? buffer * 2 + state_lane : 4 + (1 - buffer) * 2 + state_lane - 2) * kArray};
  }
  // The factors w of B_{t-1}, of methods that read two samples. A partial sum overwrites them, too.
  __device__ __forceinline__ TileArray<TileConfig> previous(int tile) const { return part(tile, 2); }
  __device__ __forceinline__ Matrices<TileConfig> matrices(int tile) const {
    Acc* const B = matrix_arrays + tile % kBuffers * 2 * Matrices<TileConfig>::kCapacity;
    return {B, B + Matrices<TileConfig>::kCapacity};
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
