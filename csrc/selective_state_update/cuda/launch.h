// Between the CUDA entry point (entry.cpp) and the kernel (update.cuh): how the work is
// cut.
//
// A row is the dstate values of one channel of one batch entry. A group of `lanes` lanes moves a row together and takes `rows`
// consecutive rows, kRowsInFlight at a time; lane j of the group owns the j-th: it reads x, dt, z of that row, computes its
// step size and gate, and writes its output. A warp's 32 / lanes groups make a tile: consecutive channels of one batch entry
// inside one group of B and C. The cut does not touch numerics: a row is summed in the same order whatever `rows` is.
//
// There are two kernels. The fast one moves vectors of state_vector_bytes of the state a lane and counts in 32 bits (addresses
// are 64-bit everywhere). It wants the dstate values of state, B, C and A contiguous and aligned, the rows of the state (and of
// A) evenly spaced, and all sizes and strides below 2^31. The general one moves one element a lane, takes any strides, and
// serves doubles, which have no fast one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "selective_state_update/selective_state_update.h"

namespace ssm_kernels::selective_state_update {

using cuda::kWarpSize, cuda::kAllLanes;
constexpr int kMaxWarpsPerBlock = 4;
// Enough rows to cover the latency of memory; more would take the registers of the warps that do the same.
constexpr int kRowsInFlight = 4;

struct Tiling {
  bool fast = false;
  int log2_lanes = 2;        // at least kRowsInFlight lanes: each owns a row in flight
  int rows = kRowsInFlight;  // per group, a multiple of kRowsInFlight and at most the number of lanes
  int warps_per_block = kMaxWarpsPerBlock;
  // Neighboring warps take the same channels of different batch entries and so share A in the first-level cache, or else
  // neighboring channels of one entry, and share B and C.
  bool batch_fastest = false;
  int64_t first_tile = 0, tiles = 0;  // of this launch and in all; more than a grid can have go into several launches
  int64_t channels_per_group = 0;
  int64_t state_stride_row = 0, A_stride_row = 0;  // elements between the rows of neighboring channels; fast kernel only
  cuda::Divisor tiles_per_batch, tiles_per_group, batch, headdim;

  SSM_HOST_DEVICE int lanes() const { return 1 << log2_lanes; }
  SSM_HOST_DEVICE int rows_per_tile() const { return (kWarpSize >> log2_lanes) * rows; }
};

// Rows of untied A are mostly 16 values: of 16-bit states, smaller vectors give each of kRowsInFlight lanes some.
constexpr int state_vector_bytes(int64_t state_bytes, bool tied_A) { return state_bytes == 2 && !tied_A ? 8 : 16; }

template <typename Input>
constexpr bool kHasFastKernels = !std::is_same_v<Input, double>;

// Input: of x, dt, B, C, z and out. Instantiated in instantiations/.
template <typename Input, typename State, typename Method>
cudaError_t launch_selective_state_update(const StateUpdateParams& params, Tiling tiling, cudaStream_t stream);

}  // namespace ssm_kernels::selective_state_update
