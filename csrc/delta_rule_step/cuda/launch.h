// The interface between the CUDA entry point (entry.cpp) and the kernels (step.cuh, staged.cuh): how warps share the work.
//
// A row is the key_dim values of one row of a head's state. A group of `lanes` lanes takes kRowsInFlight consecutive rows at a
// time. Lane j of the group holds their vectors j, j + lanes, and so on, of 16 bytes each. The 32 / lanes groups of a warp take
// a tile: consecutive rows of one head, for one row of the call.
//
// Two kernels take a call. The step kernel keeps the rows in registers. It requires contiguous rows that start at multiples of
// a vector and consist of whole vectors, and takes no fp64. The staged kernel takes any strides, columns and types: it copies a
// tile of the state to shared memory, along the contiguous axis, and back. Its lanes take the same columns and add in the same
// order, so that a row has the same bits in both.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "delta_rule_step/delta_rule_step.h"

namespace ssm_kernels::delta_rule_step {

using cuda::kWarpSize, cuda::kAllLanes;
constexpr int kMaxWarpsPerBlock = 4;
constexpr int kVectorBytes = 16;
// Two products of each of these rows are summed over the lanes of a group in one exchange, which takes 8 lanes.
constexpr int kRowsInFlight = 4;
constexpr int kMinLanes = 2 * kRowsInFlight;
// Rows of a tile of the staged kernel: neighboring rows of a column are then a sector of memory.
constexpr int kStagedRowBytes = 32;
// Vectors of a lane and row where one does not reach: a warp then takes kMaxKeyDim columns.
constexpr int most_vectors(int64_t state_bytes) {
  return static_cast<int>(kMaxKeyDim * state_bytes / (kVectorBytes * kWarpSize));
}
// Batches of kRowsInFlight rows that a lane of the step kernel holds at a time: 32 registers of states.
constexpr int batches_at_once(int vectors) { return vectors == 1 ? 2 : 1; }

struct Tiling {
  bool staged = false;
  int vectors = 1;     // of a lane and row: 1 or most_vectors
  int log2_lanes = 5;  // of a group, at least kMinLanes
  int batches = 1;     // of a group, each of kRowsInFlight rows; in the step kernel a multiple of batches_at_once
  int warps_per_block = kMaxWarpsPerBlock;
  bool rows_are_contiguous = false;  // staged kernel: along the rows, else along the columns
  uint32_t tiles = 0;                // of this launch, which begins with row `first_row` of the call. A grid has a limited size
  int64_t first_row = 0;
  cuda::Divisor tiles_per_head, heads, heads_per_key;

  SSM_HOST_DEVICE int lanes() const { return 1 << log2_lanes; }
  SSM_HOST_DEVICE int groups() const { return kWarpSize >> log2_lanes; }
  SSM_HOST_DEVICE int rows_per_tile() const { return groups() * batches * kRowsInFlight; }
};

// Bytes of shared memory of a warp: k, q and decay of its columns, and in the staged kernel its tile, whose rows are a vector
// apart, so that the rows of a column are in different banks.
SSM_HOST_DEVICE int64_t shared_bytes_of_warp(const Tiling& tiling, int64_t state_bytes, int64_t accumulate_bytes) {
  const int64_t size = kVectorBytes / state_bytes, columns = int64_t(tiling.vectors) * tiling.lanes() * size;
  return columns * 3 * accumulate_bytes + (tiling.staged ? (columns + size) * tiling.rows_per_tile() * state_bytes : 0);
}

// Input is the type of q, k, v and out. `tokens` may be null where each row has one token and one slot, and the step kernel
// takes the call with one vector a lane. Instantiated in instantiations/.
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_delta_rule_step(const StepParams& params, const TokenParams* tokens, const Tiling& tiling,
                                                  cudaStream_t stream);

SSM_KERNEL_STRUCT(Tiling, 88);

}  // namespace ssm_kernels::delta_rule_step
