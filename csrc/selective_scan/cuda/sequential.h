// Sequential selective scan on CUDA: tile sizes and plan.
//
// kStateLanes neighboring lanes share a channel, and with it up to kStates states; a lane holds kLaneStates states of each of
// kLaneChannels channels in registers. A block scans a tile of kTileChannels channels, some steps at a time. Consumer warps run
// the recurrence. Producer warps do the work that does not depend on the state (step sizes, gates, conversions), once per
// element, and pass the results through shared memory together with the rows of B and C.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan::sequential {

constexpr int kStateLanes = 4;
constexpr int kLaneStates = 4;
constexpr int kStates = kStateLanes * kLaneStates;
constexpr int kLaneChannels = 2;
constexpr int kGroupSteps = 4;  // steps that a lane computes between two loads

constexpr int kConsumerWarps = 4, kProducerWarps = 4;
constexpr int kTileChannels = kWarpSize / kStateLanes * kLaneChannels * kConsumerWarps;
constexpr int kResidentBlocks = 2;  // per multiprocessor
// Backward's tile is a chunk: it starts from a saved state.
constexpr int kBwdTileSteps = static_cast<int>(chunk_length(kStates));
static_assert(kBwdTileSteps == kPartialSumSteps && kTileChannels * kStates == 2 * kStates * kPartialSumSteps,
              "the partial sums of a tile's gradients of B and C take the place of the states before it");
// Forward's tile is small enough for kResidentBlocks blocks per multiprocessor.
constexpr int fwd_tile_steps(int scalar_bytes) { return scalar_bytes == 2 ? 32 : 16; }

struct ScanPlan : ChannelPartition {
  // How the kernels access every (batch, dim, seqlen) tensor.
  VectorAccess sequences = VectorAccess::kSingly;
  VectorAccess B = VectorAccess::kSingly, C = VectorAccess::kSingly;
};

// Bytes of shared memory of a block.
template <typename Scalar>
SSM_KERNEL_API int64_t shared_bytes(const SelectiveScanFwdParams& params);
template <typename Scalar>
SSM_KERNEL_API int64_t shared_bytes(const SelectiveScanBwdParams& params);

}  // namespace ssm_kernels::selective_scan::sequential
