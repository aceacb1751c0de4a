// Between the CUDA entry points (entry.cpp) and the kernels: how the work is cut, and what is launched.
//
// There are three sets of kernels. Forward adds the taps in the same order in all of them:
//
//   steps    channels-last: a lane has a few neighboring channels and goes along time; sequences may be packed.
//   rows     channels-first: a lane has neighboring steps of one channel, a warp goes along time; each row one sequence.
//   general  anything else (any strides, widths above kMaxVectorWidth, float64): a thread for each element.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "causal_conv1d/causal_conv1d.h"
#include "cuda/constants.h"

namespace ssm_kernels::causal_conv1d {

using cuda::kWarpSize;
constexpr int64_t kVectorBytes = cuda::kVectorBytes;
constexpr int kWarps = 4;  // of a block of the first two sets
constexpr int64_t kMaxVectorWidth = 4;
// Channels of a lane of the kernels of steps: enough to share the addresses' arithmetic, and so few that the registers leave
// room for the warps that keep memory busy (docs/tuning.md).
constexpr int kStepVector = 4;

// Blocks of the plain kernels of steps whose registers a multiprocessor has.
constexpr int kFwdBlocks = 6, kBwdBlocks = 4;

enum class KernelSet { kSteps, kRows, kGeneral };

// Whether the kernels of steps that know the width and have no packed sequences take the call.
inline bool is_plain(const ConvParams& p) { return p.ids.data == nullptr && p.width == kMaxVectorWidth; }

// How a row's time is cut. A block of the kernels of steps takes kWarps * steps steps, a warp of those of rows `steps`.
struct Tiling {
  int64_t steps = 0;
  int64_t tiles = 0;           // of a row
  int64_t channel_blocks = 0;  // of the kernels of steps
};

// Sums over a tile of time for the gradients of the parameters, in the accumulation type: (batch, tiles, width + 1, channels),
// by lag and last of bias; null if neither is wanted. A second kernel adds the tiles up in their order.
struct BwdWorkspace {
  void* sums = nullptr;
  // Of the general kernels: grad_out act'(pre), (batch, seqlen, channels), in the accumulation type.
  SequenceView grad_pre;
};

// Queue the kernels on the stream. Instantiated in instantiations/ for float, __half and __nv_bfloat16, and for double, of
// which there are the general kernels only.
template <typename Scalar>
void launch_fwd(const ConvFwdParams& params, KernelSet set, const Tiling& tiling, cudaStream_t stream);
template <typename Scalar>
void launch_bwd(const ConvBwdParams& params, KernelSet set, const Tiling& tiling, const BwdWorkspace& workspace,
                cudaStream_t stream);
template <typename Scalar>
void launch_update(const ConvUpdateParams& params, cudaStream_t stream);

}  // namespace ssm_kernels::causal_conv1d
