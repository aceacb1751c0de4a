// Selective scan, forward, of short sequences on CUDA: sizes and plan.
//
// kStateLanes neighboring lanes share a channel; each holds kLaneStates states in registers. A block scans a tile of channels
// over the whole sequence of at most kMaxSteps steps.
#pragma once

#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan::short_scan {

constexpr int kMaxSteps = 32;
constexpr int kStateLanes = 8, kLaneStates = 2, kStates = kStateLanes * kLaneStates;
constexpr int kThreads = 128, kTileChannels = kThreads / kStateLanes;
constexpr int kSharedBytes = 17 * 1024;  // of a block, at most

struct ScanPlan : ChannelPartition {
  VectorAccess u = VectorAccess::kSingly, delta = VectorAccess::kSingly, z = VectorAccess::kSingly;
  VectorAccess B = VectorAccess::kSingly, C = VectorAccess::kSingly;
};

}  // namespace ssm_kernels::selective_scan::short_scan
