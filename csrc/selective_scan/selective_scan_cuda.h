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

#include "cuda/divisor.h"
#include "selective_scan/selective_scan.h"

namespace ssm_kernels::selective_scan {

constexpr int kWarpSize = 32;
constexpr int kVectorBytes = 16;

// Forward is compiled for two cuts: lanes of a channel, and with them warps of a block and states of a slice. More lanes make
// more warps of few channels, at the price of a longer scan over the lanes and of B and C staged for fewer channels.
enum class FwdCut : int { kManyChannels, kFewChannels };
template <FwdCut cut>
struct FwdSizes {
  static constexpr int kLog2TimeLanes = cut == FwdCut::kManyChannels ? 3 : 5;
  static constexpr int kLog2Warps = 3;
  static constexpr int kSlice = cut == FwdCut::kManyChannels ? 16 : 8;
  static constexpr int kTileChannels = kWarpSize << kLog2Warps >> kLog2TimeLanes;
  // Steps of a lane. More share the cost of the scan; fewer take fewer registers, of which doubles take twice as many.
  static constexpr int log2_steps(bool is_double) { return is_double ? 3 : 4; }
  static constexpr int tile_steps(bool is_double) { return 1 << (kLog2TimeLanes + log2_steps(is_double)); }
};

// In backward a tile is one chunk: it starts from a saved state.
struct BwdSizes {
  static constexpr int kLog2TimeLanes = 3;
  static constexpr int kLog2Warps = 3;
  static constexpr int kSlice = 8;
  static constexpr int kTileChannels = kWarpSize << kLog2Warps >> kLog2TimeLanes;
  static constexpr int kLog2Steps = 3;
  static_assert(1 << (kLog2TimeLanes + kLog2Steps) == kChunkLength, "a tile is one chunk");
};

// What a kernel is compiled for, so that none asks in its loops what another needs: B and C per step; one of them or both
// constant; or the carry pass of segments, whatever B and C are.
enum class Pass : int { kPerStep, kConstants, kCarry };

// How the elements of a tile are moved: kVectorBytes at a time along the steps, or along the channels (of a matrix: the
// states), or one by one.
enum class Access : int { kAlongSteps, kAlongChannels, kSingly };

struct ScanPlan {
  FwdCut cut = FwdCut::kManyChannels;
  int block_channels = 0;  // at most a tile's; fewer where the states of more do not fit into a block's memory
  bool carry_pass = false;
  int64_t span = 0;  // channels
  int64_t tiles_per_span = 0;
  int64_t tiles = 0;  // per batch entry and segment
  int64_t segments = 1;
  int64_t segment_steps = 0;
  cuda::Divisor dstate;
  Access u = Access::kSingly, delta = Access::kSingly, z = Access::kSingly, out = Access::kSingly;
  Access grad_out = Access::kSingly, grad_u = Access::kSingly, grad_delta = Access::kSingly, grad_z = Access::kSingly;
  Access B = Access::kSingly, C = Access::kSingly;
  // (batch, segments, dim, dstate) each: what a segment multiplies the state by, and adds to it. Of more than one segment.
  void* decay = nullptr;
  void* carry = nullptr;
};

// Of backward, sums that other blocks must still be added to; in the accumulation type.
struct PartialSums {
  // (batch, tiles, dstate, padded_steps) each; null where B or C is constant, or one tile is a whole group.
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

// Bytes of shared memory of a block.
template <typename Scalar>
size_t fwd_shared_bytes(const SelectiveScanFwdParams& params, const ScanPlan& plan);
template <typename Scalar>
size_t bwd_shared_bytes(const SelectiveScanBwdParams& params, const ScanPlan& plan);

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
