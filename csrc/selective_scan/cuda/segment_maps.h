// Segment maps: the carry pass, and the summary, of zoh with B and C per step. Sizes and parameters of the kernels of
// segment_maps.cuh. The warp scan's carry pass does the same for all other calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "common/integers.h"
#include "common/kernel_abi.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan::segment_maps {

constexpr int kBlocks = 8;  // of a multiprocessor
constexpr int kThreads = 64, kLaneChannels = 2, kTileChannels = kThreads * kLaneChannels;
constexpr int kStates = 16;  // of a lane's channel
constexpr int kTileSteps = 32;
// The steps whose elements a lane loads before it uses them: kVectorSteps where a vector holds steps of a channel, else
// kFewSteps.
constexpr int kFewSteps = 4;
template <typename Scalar>
constexpr int kVectorSteps = kVectorBytes / static_cast<int>(sizeof(Scalar));
// The steps of a block. They depend on no size, so that what these kernels compute for a row does not depend on its batch.
constexpr int kPartSteps = 256;
static_assert(kPartSteps % kTileSteps == 0 && kTileSteps % kFewSteps == 0 && kTileSteps % kVectorSteps<uint16_t> == 0,
              "parts are whole tiles, and tiles whole groups");

// The maps of the segments of a call that is not packed, of h -> decay h + offset or, of the adjoint, from the adjoint after a
// segment to the one before it.
struct Params {
  bool is_adjoint = false, delta_softplus = false;
  int64_t batch = 0, dim = 0, seqlen = 0, dstate = 0;
  // input and matrix: u and B; of the adjoint, the gradients of the outputs, absent if they are zero, which z gates if the
  // outputs have a gate, and C.
  SequenceView delta, input, z;
  // How a lane loads a group of steps of its channels: vectors of both channels, vectors of steps, or elements.
  VectorAccess delta_access = VectorAccess::kSingly, input_access = VectorAccess::kSingly, z_access = VectorAccess::kSingly;
  MatrixView matrix;
  StateView A;
  ChannelView delta_bias;
  // Tiles of kTileChannels channels of a group, and of kStates states.
  int64_t group_channels = 0, tiles_per_group = 0, tiles = 0, state_tiles = 0;
  int64_t segments = 1, segment_steps = 0;
  int64_t first_segment = 0, launched_segments = 1;  // whose maps are wanted
  // (batch, segments, dim, dstate), float, of a call with channel_stride states; decay null: not wanted.
  void* decay = nullptr;
  void* offset = nullptr;
  int64_t channel_stride = 0;
  // The parts of a segment; with more than one, workspaces for the offset of each, (batch, launched_segments, parts, dim,
  // dstate), float, and for its sum of step sizes, (batch, launched_segments, parts, dim).
  int64_t parts = 1;
  void* part_offset = nullptr;
  void* part_sum = nullptr;

  int64_t all_parts() const { return batch * launched_segments * parts; }
  int64_t blocks() const { return all_parts() * state_tiles * tiles; }
};

// Whether these kernels support a call, and its states fill three quarters of the lanes' or more: with fewer the warp scan's
// carry pass is as fast.
template <typename Scalar>
bool supports(const SelectiveScanParams& params, const MatrixView& matrix) {
  return !std::is_same_v<Scalar, double> && params.discretization == Discretization::kZoh && !params.is_packed() &&
         matrix.per_step && params.dstate * 4 >= round_up(params.dstate, kStates) * 3;
}

// Queues the kernels.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch(const Params& params, cudaStream_t stream);

SSM_KERNEL_STRUCT(Params, 368);

}  // namespace ssm_kernels::selective_scan::segment_maps
