// Selective scan on CUDA with lanes in time: how the work is cut. For what is not walked: few channels, other numbers of
// states, constant B or C, doubles, mixed layouts.
//
// Time is parallel inside a warp. Its lanes are `time_lanes` x 32 / `time_lanes`: a lane takes kSteps consecutive steps of one
// channel, so that a warp holds a tile of time_lanes * kSteps steps of 32 / time_lanes channels in registers. A block of
// several warps holds one tile of neighboring channels and walks along time, tile after tile; the rows of B and C that belong
// to the tile are staged in shared memory once for all its channels, a slice of the states at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/divisor.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan::warp_scan {

// Forward is compiled for two cuts (for doubles, for few channels only): lanes of a channel, and with them the most states of a
// slice. More lanes make more warps of few channels, at the price of a longer scan over the lanes and of B and C staged for
// fewer channels.
enum class FwdConfig : int { kManyChannels, kFewChannels };
template <FwdConfig config>
struct FwdSizes {
  static constexpr int kLog2TimeLanes = config == FwdConfig::kManyChannels ? 3 : 5;
  static constexpr int kLog2Warps = 3;
  static constexpr int kSlice = config == FwdConfig::kManyChannels ? 16 : 8;
  static constexpr int kTileChannels = kWarpSize << kLog2Warps >> kLog2TimeLanes;
  // Steps of a lane. More share the cost of the scan; fewer take fewer registers, of which doubles take twice as many.
  static constexpr int log2_steps(bool is_double) { return is_double ? 3 : 4; }
  static constexpr int tile_steps(bool is_double) { return 1 << (kLog2TimeLanes + log2_steps(is_double)); }
};

// In backward a tile is one chunk or two: it starts from a saved state.
struct BwdSizes {
  static constexpr int kLog2TimeLanes = 3;
  static constexpr int kSlice = 8;
  // Of doubles half as many: each warp leaves the sums of a slice in shared memory.
  static constexpr int log2_warps(bool is_double) { return is_double ? 2 : 3; }
  static constexpr int tile_channels(bool is_double) { return kWarpSize << log2_warps(is_double) >> kLog2TimeLanes; }
  static constexpr int kLog2Steps = 3;
  static constexpr int kTileSteps = 1 << (kLog2TimeLanes + kLog2Steps);
  static_assert(kTileSteps % kShortChunk == 0 && kTileSteps % kLongChunk == 0, "a tile is whole chunks");
};

// Compile-time variants of a kernel. kPerStep, for B and C per step, is compiled once per method and has no branches for other
// cases in its loops. The other kernels serve all methods and branch on them once a slice of states: kCarry is the carry pass
// of segments, whatever B and C are; kAny does every case, and serves constant B or C, and doubles. They keep builds short.
enum class Pass : int { kPerStep, kAny, kCarry };

// Doubles have kAny alone.
template <typename Scalar>
constexpr bool kHasCommonPasses = !std::is_same_v<Scalar, double>;
// Whether a launch of kAny may be a carry pass.
template <typename Scalar>
constexpr bool kAnyCarries = !kHasCommonPasses<Scalar>;

// A block has at most a tile's channels; fewer where the states of more do not fit into its memory. Where those of one do not,
// forward's slices are of fewer states too.
struct ScanPlan : ChannelPartition {
  FwdConfig config = FwdConfig::kManyChannels;
  int slice = 0;  // states; of forward
  bool carry_pass = false;
  cuda::Divisor dstate;
  VectorAccess u = VectorAccess::kSingly, delta = VectorAccess::kSingly, z = VectorAccess::kSingly, out = VectorAccess::kSingly;
  VectorAccess grad_out = VectorAccess::kSingly, grad_u = VectorAccess::kSingly, grad_delta = VectorAccess::kSingly,
               grad_z = VectorAccess::kSingly;
  VectorAccess B = VectorAccess::kSingly, C = VectorAccess::kSingly;
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
}  // namespace ssm_kernels::selective_scan::warp_scan
