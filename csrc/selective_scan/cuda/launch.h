// Between the CUDA entry point (entry.cpp) and the kernels: what the three ways of scanning share.
// * Walking (sequential.h): a lane walks through time with states of two channels. For nearly 16 states, B and C per step,
// types
//   of at most 32 bits, sequences of one layout; in forward for many channels only. A block takes up to 112 KB of shared
//   memory, and a multiprocessor must have room for two (compute capability 9.0: 228 KB).
// * Lanes in time (warp_scan.h): a lane takes some consecutive steps of one channel, and lanes compose their maps of the
//   state. For whatever the other two do not take.
// * Sequential (short_scan.h): forward of up to 32 steps and 16 states, with B and C per step, types of at most 32 bits, and
//   fewer channels than walking takes.
// plan.cpp decides.
//
// In all of them a block takes a tile of neighboring channels along time, so that the rows of B and C are staged once for all
// of them. Its channels share these rows: they lie in one span, the longest run of channels for which neither group changes.
//
// Where batch and dim leave the device idle, time is also cut into segments, each for blocks of its own: a first launch (the
// carry pass, of time_lanes) finds how each segment maps the state before it to the state after it, in backward the adjoint
// after it to that before it, which the second launch folds on the way to its own segment.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/constants.h"
#include "selective_scan/selective_scan.h"

namespace ssm_kernels::selective_scan {

using cuda::kWarpSize, cuda::kVectorBytes, cuda::kAllLanes;

// How the elements of a tile are moved: kVectorBytes at a time along the steps, or along the channels (of a matrix: the
// states), or one by one.
enum class VectorAccess : int { kAlongSteps, kAlongChannels, kSingly };

// How channels and time are shared out among blocks.
struct ChannelPartition {
  int block_channels = 0;
  int64_t span = 0;  // channels
  int64_t tiles_per_span = 0;
  int64_t tiles = 0;  // per batch entry and segment
  int64_t segments = 1;
  int64_t segment_steps = 0;
  // Those that a launch takes: all of them, or in the carry pass those whose maps others fold.
  int64_t first_segment = 0, launched_segments = 1;
  // (batch, segments, dim, dstate) each: what a segment multiplies the state by, and adds to it. Of more than one segment.
  void* decay = nullptr;
  void* carry = nullptr;
};

// Backward's partial sums, one per block, in the accumulation type; a second kernel adds them up. Null where the gradient is
// absent or not needed.
struct PartialSums {
  // Of the partition whose blocks leave them.
  int64_t tiles = 0, segments = 1;
  // (batch, tiles, dstate, padded_steps) each; null too where B or C is constant, or one tile is a whole group.
  void* grad_B = nullptr;
  void* grad_C = nullptr;
  int64_t padded_steps = 0;
  // (batch * segments, dim, dstate), of constant B and C too, and (batch * segments, dim).
  void* grad_A = nullptr;
  void* grad_constant_B = nullptr;
  void* grad_constant_C = nullptr;
  void* grad_D = nullptr;
  void* grad_delta_bias = nullptr;
};

// Adds up the partial sums, in a fixed order, into the gradients.
template <typename Scalar>
cudaError_t launch_bwd_finish(const SelectiveScanBwdParams& params, const PartialSums& partial_sums, cudaStream_t stream);

}  // namespace ssm_kernels::selective_scan
