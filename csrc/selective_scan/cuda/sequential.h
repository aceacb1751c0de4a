// Selective scan on CUDA with walking lanes: how the work is cut.
//
// A lane has kLaneStates states of two channels in registers; kStateLanes neighboring lanes share a channel, and with it its up
// to kStates states. A block takes its tile of channels through time some steps at a time. What does not depend on the state
// (step sizes, gates, conversions) is done once for each element of a tile, by other warps, which read and write it and hand it
// to the lanes through shared memory; the rows of B and C that belong to the tile lie there too, staged once for all its
// channels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan::sequential {

constexpr int kStateLanes = 4;
constexpr int kLaneStates = 4;
constexpr int kStates = kStateLanes * kLaneStates;
constexpr int kLaneChannels = 2;
constexpr int kGroupSteps = 4;  // that a lane takes between two loads

// Warps of a block that walk, and that move.
constexpr int kConsumerWarps = 4, kProducerWarps = 4;
constexpr int kTileChannels = kWarpSize / kStateLanes * kLaneChannels * kConsumerWarps;
constexpr int kResidentBlocks = 2;  // of a multiprocessor
// Of a tile of backward: it starts from a saved state.
constexpr int kBwdTileSteps = static_cast<int>(chunk_length(kStates));
// Of a tile of forward: what lets a multiprocessor have kResidentBlocks.
constexpr int fwd_tile_steps(int scalar_bytes) { return scalar_bytes == 2 ? 32 : 16; }

struct ScanPlan : ChannelPartition {
  // Of the tensors (batch, dim, seqlen) together: whether they can be moved by vectors, and along which dimension.
  bool has_vectors = false, along_channels = false;
  VectorAccess B = VectorAccess::kSingly, C = VectorAccess::kSingly;
};

// Bytes of shared memory of a block.
template <typename Scalar>
size_t fwd_shared_bytes(const SelectiveScanFwdParams& params);
template <typename Scalar>
size_t bwd_shared_bytes();

// Forward has no segments.
template <typename Scalar, typename Method>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream);
template <typename Scalar, typename Method>
cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const ScanPlan& plan, const PartialSums& partial_sums,
                       cudaStream_t stream);

}  // namespace ssm_kernels::selective_scan::sequential
