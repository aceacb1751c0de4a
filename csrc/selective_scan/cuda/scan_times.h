// The times of the sequential scan and of the warp scan, by which plan.cpp chooses between them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/integers.h"
#include "selective_scan/cuda/plan.h"

namespace ssm_kernels::selective_scan {

// The mean number of steps of a row.
inline int64_t steps_of_row(const SelectiveScanParams& p) {
  return p.is_packed() ? ceil_div(p.batch * p.seqlen, std::max<int64_t>(1, p.rows)) : p.seqlen;
}

// Divides the channels into tiles of `block_channels`.
inline void set_tiles(ChannelPartition& partition, const SelectiveScanParams& p, int block_channels) {
  partition.block_channels = block_channels;
  partition.group_channels = std::gcd(p.dim / p.B.groups, p.dim / p.C.groups);
  partition.tiles_per_group = ceil_div(partition.group_channels, block_channels);
  partition.tiles = p.dim / partition.group_channels * partition.tiles_per_group;
}

constexpr int64_t kWarpScanResidentWarps = 16;  // per multiprocessor, limited by registers

// The time of a launch in waves of blocks that fill every multiprocessor. A last wave with one block for a multiprocessor or
// fewer takes `alone` of a whole one.
inline double waves(int64_t blocks, int64_t resident, const DeviceLimits& device, double alone) {
  const int64_t slots = device.multiprocessors * resident, rest = blocks % slots;
  const double last = rest == 0 ? 0 : rest <= device.multiprocessors ? alone : 1;
  return static_cast<double>(blocks / slots) + last;
}

// The time of a kernel: microseconds of a launch and of a step of a wave of blocks, on an H200 with 16 states. A last wave
// takes `partial` of a wave longer where a tile of channels is not whole: its blocks take paths with bounds checks.
struct ScanTime {
  double launch, step, alone, partial;

  double of(const SelectiveScanParams& p, const DeviceLimits& device, int tile_channels, int64_t steps, int64_t segments,
            int64_t resident) const {
    ChannelPartition partition;
    set_tiles(partition, p, tile_channels);
    const bool is_partial = partition.group_channels % tile_channels != 0;
    const double rounds = waves(p.rows * partition.tiles * segments, resident, device, alone) + (is_partial ? partial : 0);
    return launch + step * static_cast<double>(steps) * rounds;
  }
};

// The times of a kernel for calls whose dense rows start at multiples of kVectorBytes, and for others.
struct ScanTimes {
  ScanTime aligned, shifted;

  const ScanTime& of(bool is_shifted) const { return is_shifted ? shifted : aligned; }
};

// Whether dense rows of the call's sizes start between multiples of kVectorBytes. The choice of a kernel depends on sizes only,
// so that a copy with aligned rows has the same bits.
inline bool has_shifted_sizes(const SelectiveScanParams& p, VectorAccess sequences, int64_t bytes) {
  return is_along_channels(sequences) ? p.dim * bytes % kVectorBytes != 0
                                      : p.is_packed() || p.seqlen * bytes % kVectorBytes != 0;
}

// The time of the warp scan's Pass::kAny over that of Pass::kPerStep with 16 states, measured in float64.
constexpr double kSlowdownOfAnyFwd = 1.45, kSlowdownOfAnyBwd = 1.6;

// Whether forward's warp scan fills the device with few lanes to a channel. Pass::kAny has many lanes to a channel, and with
// fewer channels is about as fast as Pass::kPerStep.
inline bool has_many_channels(const SelectiveScanParams& p, const DeviceLimits& device) {
  using Many = warp_scan::FwdSizes<warp_scan::FwdConfig::kManyChannels>;
  return p.rows * ceil_div(p.dim << Many::kLog2TimeLanes, int64_t(kWarpSize)) >=
         device.multiprocessors * kWarpScanResidentWarps * 3 / 8;
}

inline int64_t rounded_steps(const SelectiveScanParams& p, int64_t tile_steps) {
  return round_up(std::max<int64_t>(1, steps_of_row(p)), tile_steps);
}

// docs/tuning/selective_scan.md has the measurements, benchmarks/bench_sizes.py repeats them.
inline bool is_sequential_fwd_faster(const SelectiveScanParams& p, VectorAccess sequences, int64_t bytes,
                                     const DeviceLimits& device) {
  using Many = warp_scan::FwdSizes<warp_scan::FwdConfig::kManyChannels>;
  constexpr ScanTimes kSequential = {{14, 0.1155, 0.632, 0.15}, {17, 0.131, 0.664, 0.15}};
  constexpr ScanTimes kAlongChannels = {{20, 0.1155, 0.567, 0.15}, {20, 0.1155, 0.7, 0}};
  constexpr ScanTimes kWarpScan = {{13, 0.0785, 0.7, 0}, {15, 0.1, 0.78, 0}};
  constexpr ScanTimes kSequentialOfFloats = {{14, 0.134, 0.662, 0.2}, {12, 0.175, 0.782, 0.2}};
  constexpr ScanTimes kAlongChannelsOfFloats = {{13, 0.134, 0.74, 0.2}, {16, 0.16, 0.8, 0}};
  // Aligned: a little less than measured. Of equals the warp scan loses less where rows start between vectors.
  constexpr ScanTimes kWarpScanOfFloats = {{12, 0.0885, 0.8, 0}, {16, 0.118, 0.8, 0}};
  const bool is_shifted = has_shifted_sizes(p, sequences, bytes), along_channels = is_along_channels(sequences);
  const ScanTimes& sequential = bytes == 4 ? (along_channels ? kAlongChannelsOfFloats : kSequentialOfFloats)
                                           : (along_channels ? kAlongChannels : kSequential);
  const ScanTimes& warp_scan = bytes == 4 ? kWarpScanOfFloats : kWarpScan;
  const int64_t steps = rounded_steps(p, sequential::fwd_tile_steps(static_cast<int>(bytes)));
  const double slowdown = is_common(p.discretization) || !has_many_channels(p, device) ? 1 : kSlowdownOfAnyFwd;
  return sequential.of(is_shifted).of(p, device, sequential::kTileChannels, steps, 1, sequential::kResidentBlocks) <
         slowdown * warp_scan.of(is_shifted)
                        .of(p, device, Many::kTileChannels, rounded_steps(p, Many::tile_steps(false)), 1,
                            kWarpScanResidentWarps >> Many::kLog2Warps);
}

// With more than two segments the sequential scan fills the device where the warp scan leaves multiprocessors to one block.
// With fewer states the warp scan takes less time, and the sequential scan does not.
inline bool is_sequential_bwd_faster(const SelectiveScanParams& p, const sequential::ScanPlan& plan, int64_t bytes,
                                     const DeviceLimits& device) {
  if (plan.segments > 2) return true;
  using Sizes = warp_scan::BwdSizes;
  constexpr ScanTimes kSequential = {{17, 0.408, 0.8, 0.4}, {33, 0.51, 0.85, 0.4}};
  constexpr ScanTimes kWarpScan = {{14, 0.303, 0.69, 0}, {28, 0.352, 0.72, 0}};
  constexpr ScanTimes kSequentialOfFloats = {{17, 0.43, 0.8, 0.4}, {22, 0.585, 0.85, 0.4}};
  constexpr ScanTimes kWarpScanOfFloats = {{14, 0.313, 0.72, 0}, {28, 0.378, 0.74, 0}};
  // The carry pass before two segments: a launch, and a step of a segment.
  constexpr double kCarryLaunch = 10, kCarryStep = 0.12, kShiftedCarryLaunch = 14, kShiftedCarryStep = 0.155;
  const bool is_shifted = has_shifted_sizes(p, plan.sequences, bytes);
  const ScanTime& sequential = (bytes == 4 ? kSequentialOfFloats : kSequential).of(is_shifted);
  const ScanTime& warp_scan = (bytes == 4 ? kWarpScanOfFloats : kWarpScan).of(is_shifted);
  const int64_t steps = plan.segments > 1 ? plan.segment_steps : rounded_steps(p, sequential::kBwdTileSteps);
  double sequential_time =
      sequential.of(p, device, sequential::kTileChannels, steps, plan.segments, sequential::kResidentBlocks);
  if (plan.segments > 1) {
    sequential_time += (is_shifted ? kShiftedCarryLaunch : kCarryLaunch) +
                       (is_shifted ? kShiftedCarryStep : kCarryStep) * static_cast<double>(steps);
  }
  const double states = 0.27 + 0.73 * static_cast<double>(p.dstate) / sequential::kStates;
  const double slowdown = is_common(p.discretization) ? 1 : kSlowdownOfAnyBwd;
  return sequential_time < slowdown * states *
                               warp_scan.of(p, device, Sizes::tile_channels(false), rounded_steps(p, Sizes::kTileSteps), 1,
                                            kWarpScanResidentWarps >> Sizes::log2_warps(false));
}

}  // namespace ssm_kernels::selective_scan
