// Interface between the CUDA entry points (entry.cpp) and the kernels: the tiling and the launchers.
//
// Three sets of kernels implement the convolution. Forward adds the taps in the same order in all of them.
//
//   channels last   a lane owns a few channels and advances in time; sequences may be packed. Forward also has a kernel for
//                   runs of up to 32 steps, which takes aligned rows without packed sequences
//   channels first  a lane owns neighboring steps of one channel, and a warp advances in time; no packed sequences
//   general         any strides and widths, and float64: one thread per element
//
// The first two are compiled for rows of aligned vectors and, as shifted, for rows that start at any element and have any
// length. Both forms give the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "causal_conv1d/causal_conv1d.h"
#include "common/kernel_abi.h"
#include "cuda/constants.h"
#include "cuda/divisor.h"

namespace ssm_kernels::causal_conv1d {

using cuda::kWarpSize;
constexpr int kLogWarpSize = 5;
static_assert(kWarpSize == 1 << kLogWarpSize);
constexpr int64_t kVectorBytes = cuda::kVectorBytes;
constexpr int kWarps = 4;  // per block of the first two sets
constexpr int64_t kMaxVectorWidth = 4;
// Grids have at most so many blocks along their second and third axes.
constexpr int64_t kMostGridBlocks = 65535;
// Channels per lane of the channels-last kernels. More share the address arithmetic; fewer leave registers for more warps in
// flight. docs/tuning/causal_conv1d.md has the measurements.
constexpr int kLaneChannels = 4;

// Resident blocks per multiprocessor of the specialized channels-last kernels, which bound their registers.
constexpr int kFwdBlocks = 6, kBwdBlocks = 4;

// Forward by runs (channels_last_run_fwd.cuh): the steps that a warp loads at once, by the bytes of an element, so that both
// have the same bytes; the fewest and the most steps of a run; resident blocks per multiprocessor.
constexpr int64_t run_steps(int64_t bytes) { return bytes > 2 ? 4 : 8; }
constexpr int64_t kLeastRun = 4, kLongRun = 32;
constexpr int kRunBlocks = 5;

// At least so many lanes of the shifted channels-first kernels share a row: each row takes one more block than lanes.
constexpr int kLeastLogShiftedLanes = 2;

enum class KernelSet {
  kChannelsLast,
  kChannelsLastRuns,
  kChannelsLastShifted,
  kChannelsFirst,
  kChannelsFirstShifted,
  kGeneral
};

// Whether the specialized channels-last kernels take the call: they are compiled for a width of kMaxVectorWidth and for batch
// entries of one sequence each.
inline bool is_specialized(const ConvParams& p) { return p.ids.data == nullptr && p.width == kMaxVectorWidth; }

// Tiles of time. A tile is kWarps * steps steps in the channels-last kernels, one tile a block, and `steps` steps in the
// others.
struct Tiling {
  int64_t steps = 0;
  int64_t tiles = 0;           // per batch row
  int64_t channel_blocks = 0;  // channels last: blocks that share a tile's steps
  // Channels first: tiles and channels, which 32 bits hold; 2^log_row_lanes lanes of a warp share a row, fewer than the warp
  // only with one tile.
  cuda::Divisor tiles_divisor, channels_divisor;
  int log_row_lanes = kLogWarpSize;
};

struct BwdWorkspace {
  // Partial sums of grad_weight, by lag, and of grad_bias: (batch, tiles, width + 1, channels) in the accumulation type, one
  // row of width + 1 per tile. A second kernel adds them in the order of the tiles. Null if neither gradient is needed.
  void* sums = nullptr;
  // General kernels: grad_out act'(pre), (batch, seqlen, channels), in the accumulation type.
  SequenceView grad_pre;
};

// Launch the kernels on the stream. Instantiated in instantiations/ for float, __half, __nv_bfloat16 and double; double has
// general kernels only.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_fwd(const ConvFwdParams& params, KernelSet set, const Tiling& tiling, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_bwd(const ConvBwdParams& params, KernelSet set, const Tiling& tiling,
                                      const BwdWorkspace& workspace, cudaStream_t stream);
// The second kernel of `sums` alone, for `tiles` rows of them.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_bwd_reduce(const ConvBwdParams& params, const void* sums, int64_t tiles, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_update(const ConvUpdateParams& params, const ConvTokenParams* tokens, cudaStream_t stream);

SSM_KERNEL_STRUCT(Tiling, 64);
SSM_KERNEL_STRUCT(BwdWorkspace, 40);

}  // namespace ssm_kernels::causal_conv1d
