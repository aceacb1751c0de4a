// The interface between the CUDA entry point (entry.cpp) and the kernels of the selective scan. plan.cpp picks one of three:
//
// * Sequential scan (sequential.h): warp specialized. A consumer lane takes the states of two channels through time. For 13 to
//   16 states, B and C per step, types of at most 32 bits, and sequences of one layout, in rows that start at any element; in
//   forward for many channels only. A block takes up to 114 KB of shared memory, and a multiprocessor must have room for two
//   (compute capability 9.0: 228 KB).
// * Warp scan (warp_scan.h): a lane takes some consecutive steps of one channel, and lanes compose their maps of the state. For
//   all calls that the other two do not take.
// * Short scan (short_scan.h): forward of up to 32 steps and 16 states, with B and C per step, types of at most 32 bits, and
//   fewer channels than the sequential scan takes.
//
// The methods of SSM_FURTHER_DISCRETIZATIONS have kernels of their own for the first two (further_fwd.cuh, further_bwd.cuh),
// and no short scan; so do those of SSM_TWO_SAMPLE_DISCRETIZATIONS (two_sample_fwd.cuh, two_sample_bwd.cuh), whose recurrence
// reads the sample before, too: two_sample_forms.cuh has it, and two_sample.cuh says where a block finds that sample.
//
// In all of them a block takes a tile of neighboring channels along time, and stages the rows of B and C once for all of them.
// No tile crosses a group: the longest range of channels that share a group of B and a group of C.
//
// Where batch and dim leave the device idle, time is split into segments, each for blocks of its own. A first launch, the carry
// pass, finds each segment's map of the state before it to the state after it; in backward, of the adjoint after it to the one
// before it. Its kernels are those of segment_maps.h for zoh with many states and enough blocks, else the warp scan's. The
// second launch folds the maps of earlier segments into its first state. A summary, and the gradient of an initial state from
// those of the outputs, take the first launch alone (summary.h). Packed sequences have one segment each: a block reads where
// its sequence begins and ends from device memory, and the host knows no lengths.
//
// Backward leaves partial sums of grad_B and grad_C, one for each tile of channels. Where time is one segment, backward takes
// spans of time one after the other, the last first, so that the partial sums of one span exist at a time, most of them in the
// second-level cache. A span is a call on a part of the steps: it stores the adjoint of the state before its first step, from
// which the launch for the span before it starts. Methods that read two samples have one span: a sample's gradient has terms of
// two steps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "cuda/constants.h"
#include "selective_scan/selective_scan.h"

namespace ssm_kernels::selective_scan {

using cuda::kWarpSize, cuda::kVectorBytes, cuda::kAllLanes;

// How a tile's elements are loaded and stored: kVectorBytes at a time along the steps, or along the channels (for B and C: the
// states), with rows that start at multiples of kVectorBytes; the same of rows that start and end at any element (kShifted
// along the steps, kShiftedChannels along the channels; types of at most 32 bits, not in the short scan); along the steps of
// rows that descend in memory, as those of a reverse scan do (kDescending, not in the short scan); or one by one. In this
// order one comparison says whether vectors are along the channels; odd values are shifted.
enum class VectorAccess : int { kAlongChannels, kShiftedChannels, kAlongSteps, kShifted, kSingly, kDescending = 6 };
SSM_HOST_DEVICE constexpr bool is_along_channels(VectorAccess access) { return access <= VectorAccess::kShiftedChannels; }
SSM_HOST_DEVICE constexpr bool is_shifted(VectorAccess access) { return static_cast<int>(access) % 2 != 0; }

// The methods with most kernels. Others have, to keep the build short, no kernels of the warp scan of their own
// (Pass::kPerStep).
template <typename Method>
constexpr bool kIsCommon = std::is_same_v<Method, Zoh> || std::is_same_v<Method, ZohExact> || std::is_same_v<Method, Bilinear>;
inline bool is_common(Discretization method) {
  bool result = false;
  if (is_two_sample(method)) return result;
  visit_discretization(method, [&](auto rule) { result = kIsCommon<decltype(rule)>; });
  return result;
}

// How blocks share channels and time.
struct ChannelPartition {
  int block_channels = 0;
  int64_t group_channels = 0;
  int64_t tiles_per_group = 0;
  int64_t tiles = 0;  // per row and segment
  int64_t segments = 1;
  int64_t segment_steps = 0;
  // The segments of a launch: all, or in the carry pass those whose maps other segments fold.
  int64_t first_segment = 0, launched_segments = 1;
  // (rows, segments, dim, dstate) each: h -> decay h + offset, a segment's map. Null if there is one segment.
  void* decay = nullptr;
  void* offset = nullptr;
};

constexpr int kPartialSumSteps = kShortChunk;

// Backward's partial sums, one per block, in the accumulation type. bwd_reduce.cuh adds them. Null if the gradient is absent
// or not needed.
struct PartialSums {
  // The tiles and segments of the launch that stores them.
  int64_t tiles = 0, segments = 1;
  // Whether the gradients of A, constant B and C, D and delta_bias hold the sums of later spans, to which these are added.
  bool adds = false;
  // (batch, tiles, dstate, steps) each. Also null if B or C is constant, or if one tile is a whole group. kPartialSumSteps
  // steps are neighbors. They lie in a workspace, where chunk_stride is kPartialSumSteps, or in the chunk states
  // (reuse_chunk_states).
  void* grad_B = nullptr;
  void* grad_C = nullptr;
  int64_t batch_stride = 0, tile_stride = 0, state_stride = 0, chunk_stride = 0;

  SSM_HOST_DEVICE int64_t offset(int64_t batch, int64_t tile, int64_t state, int64_t step) const {
    const uint64_t place = static_cast<uint64_t>(step);
    // In this order the compiler keeps the sequential scan within its registers.
    return state * state_stride + static_cast<int64_t>(place / kPartialSumSteps) * chunk_stride +
           static_cast<int64_t>(place % kPartialSumSteps) + batch * batch_stride + tile * tile_stride;
  }
  // (rows * segments, dim, dstate) for A and constant B and C; (rows * segments, dim) for D and delta_bias.
  void* grad_A = nullptr;
  void* grad_constant_B = nullptr;
  void* grad_constant_C = nullptr;
  void* grad_D = nullptr;
  void* grad_delta_bias = nullptr;
};

SSM_KERNEL_STRUCT(PartialSums, 112);

}  // namespace ssm_kernels::selective_scan
