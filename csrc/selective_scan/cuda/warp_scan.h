// Warp scan: the selective scan on CUDA, parallel in time inside a warp. Sizes and plan.
//
// A warp's lanes are kTimeLanes x 32 / kTimeLanes. A lane computes kSteps consecutive steps of one channel, so that a warp
// holds a tile of kTimeLanes * kSteps steps of 32 / kTimeLanes channels in registers. A block of several warps loops over the
// tiles in time of its channels; the rows of B and C of a tile are staged in shared memory once for all channels, a slice of
// the states at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "cuda/divisor.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

struct FurtherMethod;    // transition.cuh
struct TwoSampleMethod;  // transition.cuh
struct SeparateMethod;   // transition.cuh
struct SeparateTwoSampleMethod;

namespace warp_scan {

// Forward's tile shapes; doubles have kFewChannels only. kFewChannels has more lanes per channel, so that few channels make
// more warps. It costs a longer scan over the lanes, and each load of B and C serves fewer channels. kSmallBlocks has half as
// many warps for as many channels: three or four of its blocks take turns on a multiprocessor, where the third of kFewChannels
// would wait for the first two.
enum class FwdConfig : int { kManyChannels, kFewChannels, kSmallBlocks };
template <FwdConfig config>
struct FwdSizes {
  static constexpr int kLog2TimeLanes = config == FwdConfig::kManyChannels ? 3 : config == FwdConfig::kFewChannels ? 5 : 4;
  static constexpr int kLog2Warps = config == FwdConfig::kSmallBlocks ? 2 : 3;
  static constexpr int kSlice = config == FwdConfig::kFewChannels ? 8 : 16;
  static constexpr int kTileChannels = kWarpSize << kLog2Warps >> kLog2TimeLanes;
  // More steps per lane amortize the scan; fewer need fewer registers, and doubles need twice as many.
  static constexpr int log2_steps(bool is_double) { return is_double ? 3 : 4; }
  static constexpr int tile_steps(bool is_double) { return 1 << (kLog2TimeLanes + log2_steps(is_double)); }
};
// The methods for which kSmallBlocks is compiled.
template <typename Method>
constexpr bool kHasSmallBlocks = std::is_same_v<Method, Zoh>;

// Backward's tile is one or two chunks and starts from a saved state.
struct BwdSizes {
  static constexpr int kLog2TimeLanes = 3;
  static constexpr int kMaxSlice = 8;
  // Half as many for doubles: each warp stores its sums of a slice in shared memory.
  static constexpr int log2_warps(bool is_double) { return is_double ? 2 : 3; }
  static constexpr int tile_channels(bool is_double) { return kWarpSize << log2_warps(is_double) >> kLog2TimeLanes; }
  static constexpr int kLog2Steps = 3;
  static constexpr int kTileSteps = 1 << (kLog2TimeLanes + kLog2Steps);
  static_assert(kTileSteps % kShortChunk == 0 && kTileSteps % kLongChunk == 0, "a tile is a multiple of a chunk");
};

// Compile-time variants of a kernel. kPerStep, for B and C per step, is compiled once per common method and has no branches for
// other cases in its loops. The other kernels serve all methods and branch on them once a slice of states: kCarry is the carry
// pass of segments, whatever B and C are; kAny does every case, and serves constant B or C, other methods, and doubles. They
// keep builds short.
enum class Pass : int { kPerStep, kAny, kCarry };

// Doubles have kAny alone.
template <typename Scalar>
constexpr bool kHasCommonPasses = !std::is_same_v<Scalar, double>;
// Whether a launch of kAny may be a carry pass. FurtherMethod, TwoSampleMethod, SeparateMethod and SeparateTwoSampleMethod have
// no kernels but kAny.
template <typename Scalar, typename Method>
constexpr bool kAnyCarries =
    !kHasCommonPasses<Scalar> || std::is_same_v<Method, FurtherMethod> || std::is_same_v<Method, TwoSampleMethod> ||
    std::is_same_v<Method, SeparateMethod> || std::is_same_v<Method, SeparateTwoSampleMethod>;

// A block has a tile's channels, or fewer if their states do not fit into shared memory. If even one channel's do not fit,
// the slices shrink too. Backward also halves its slices where more blocks then fit into a multiprocessor.
struct ScanPlan : ChannelPartition {
  FwdConfig config = FwdConfig::kManyChannels;
  int slice = 0;  // states per slice
  bool carry_pass = false;
  cuda::Divisor dstate;
  VectorAccess u = VectorAccess::kSingly, delta = VectorAccess::kSingly, z = VectorAccess::kSingly, out = VectorAccess::kSingly;
  VectorAccess grad_out = VectorAccess::kSingly, grad_u = VectorAccess::kSingly, grad_delta = VectorAccess::kSingly,
               grad_z = VectorAccess::kSingly;
  VectorAccess B = VectorAccess::kSingly, C = VectorAccess::kSingly;
  bool has_shifted_vectors = false;  // of any tensor
};

// More than the static shared memory of the kernels of methods that read two samples: 8 warps of float or 4 of double sums.
constexpr int64_t kTwoSampleStaticBytes = 8 * kMaxDstate * static_cast<int64_t>(sizeof(float)) + 1024;

// Bytes of shared memory of a block.
template <typename Scalar>
SSM_KERNEL_API int64_t shared_bytes(const SelectiveScanFwdParams& params, const ScanPlan& plan);
template <typename Scalar>
SSM_KERNEL_API int64_t shared_bytes(const SelectiveScanBwdParams& params, const ScanPlan& plan);

}  // namespace warp_scan
}  // namespace ssm_kernels::selective_scan
