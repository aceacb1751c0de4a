// Between the CUDA entry point (selective_scan_cuda.cpp) and the kernels: how the work is cut.
//
// Time is parallel inside a warp. Its lanes are `time_lanes` x 32 / `time_lanes`: a lane takes kSteps consecutive steps of one
// channel, so that a warp holds a tile of time_lanes * kSteps steps of 32 / time_lanes channels in registers. A block of
// several warps holds one tile of neighboring channels and walks along time, tile after tile; the rows of B and C that belong
// to the tile are staged in shared memory once for all its channels, a slice of the states at a time.
//
// Where batch and dim leave the device idle, time is also cut into segments, each for blocks of its own: a first launch (the
// carry pass) finds how each segment maps the state before it to the state after it, which the second launch folds on the way
// to its own segment.
//
// A block's channels share their rows of B and of C: they lie in one span, the longest run of channels for which neither group
// changes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "selective_scan/selective_scan.h"

namespace ssm_kernels::selective_scan {

constexpr int kWarpSize = 32;
constexpr int kVectorBytes = 16;
constexpr int kFwdMaxWarps = 8;
// Blocks of a Hopper cluster that add up their parts of the gradients of B and C before anything is written.
constexpr int kMaxClusterBlocks = 8;

// Steps of a lane. More steps share the cost of a scan over the lanes; fewer take fewer registers.
template <typename Acc>
constexpr int kFwdSteps = std::is_same_v<Acc, double> ? 8 : 16;
constexpr int kBwdSteps = 8;
// The cut of backward is fixed when compiling, which leaves registers for what is not. A tile is one chunk.
constexpr int kBwdLog2Warps = 2;
constexpr int kBwdLog2TimeLanes = 3;
constexpr int kBwdLog2Slice = 3;
constexpr int kBwdTimeLanes = 1 << kBwdLog2TimeLanes;
static_assert(kBwdTimeLanes * kBwdSteps == kChunkLength, "backward starts each tile from a saved state");

// How the elements of a tile are moved: kVectorBytes at a time along the steps, or along the channels (of a matrix: the
// states), or one by one.
enum class Access : int { kAlongSteps, kAlongChannels, kSingly };

struct ScanPlan {
  int log2_warps = kBwdLog2Warps;
  int log2_time_lanes = kBwdLog2TimeLanes;
  int log2_slice = kBwdLog2Slice;
  int cluster = 1;  // blocks of a cluster: neighboring tiles of channels
  bool carry_pass = false;
  int64_t span = 0;            // channels
  int64_t tiles_per_span = 0;  // a multiple of `cluster`; the last ones may be empty
  int64_t tiles = 0;           // per batch entry and segment
  int64_t segments = 1;
  int64_t segment_steps = 0;
  Access u = Access::kSingly, delta = Access::kSingly, z = Access::kSingly, out = Access::kSingly;
  Access grad_out = Access::kSingly, grad_u = Access::kSingly, grad_delta = Access::kSingly, grad_z = Access::kSingly;
  Access B = Access::kSingly, C = Access::kSingly;
  // (batch, segments, dim, dstate) each: what a segment multiplies the state by, and adds to it. Of more than one segment.
  void* decay = nullptr;
  void* carry = nullptr;

  SSM_HOST_DEVICE int threads() const { return kWarpSize << log2_warps; }
  SSM_HOST_DEVICE int channels() const { return threads() >> log2_time_lanes; }
};

// Of backward, sums that other blocks must still be added to; in the accumulation type.
struct PartialSums {
  // (batch, tiles / cluster, dstate, padded_steps) each; null where B or C is constant.
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

// Bytes of shared memory of a forward block.
template <typename Scalar>
size_t fwd_shared_bytes(const SelectiveScanParams& params, const ScanPlan& plan);

template <typename Scalar, typename Method>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream);
template <typename Scalar, typename Method>
cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const ScanPlan& plan, const PartialSums& partial_sums,
                       cudaStream_t stream);
// Adds up the partial sums, in a fixed order, into the gradients.
template <typename Scalar>
cudaError_t launch_bwd_finish(const SelectiveScanBwdParams& params, const ScanPlan& plan, const PartialSums& partial_sums,
                              cudaStream_t stream);

}  // namespace ssm_kernels::selective_scan
