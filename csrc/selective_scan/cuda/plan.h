// How a call of the selective scan is cut for a device: by which of the three ways, and how each shares out channels and time.
// Plain data to plain data; what it decides depends on sizes, strides and the device only.
#pragma once

#include <cstdint>

#include "selective_scan/cuda/launch.h"
#include "selective_scan/cuda/sequential.h"
#include "selective_scan/cuda/short_scan.h"
#include "selective_scan/cuda/warp_scan.h"

namespace ssm_kernels::selective_scan {

// What the cut depends on.
struct DeviceLimits {
  int64_t multiprocessors = 0, shared_bytes_per_block = 0;
  // Of a multiprocessor in all, and what each block takes beside its own.
  int64_t shared_bytes = 0, reserved_shared_bytes_per_block = 0;
};

// Either a preference, followed where the way can do the call, or the faster one. The values of
// DebugOption::kSelectiveScanKernel.
enum class KernelChoice : int { kFaster, kSequential, kWarpScan };

struct Plan {
  bool is_sequential = false, is_short = false;
  short_scan::ScanPlan short_scan;
  sequential::ScanPlan sequential;
  // Of the carry pass too, where it is walking that has segments: the same ones.
  warp_scan::ScanPlan warp_scan;
  // Of a block of any of its launches, the most. More than the device's limit only if no cut of the call fits.
  int64_t shared_bytes = 0;

  const ChannelPartition& partition() const {
    if (is_short) return short_scan;
    return is_sequential ? static_cast<const ChannelPartition&>(sequential) : warp_scan;
  }
};

template <typename Scalar>
Plan plan_fwd(const SelectiveScanFwdParams& params, const DeviceLimits& device, KernelChoice choice);
// Whether it walks does not depend on the layout of grad_out: one that does not fit (has_layout) is for the caller to copy.
template <typename Scalar>
Plan plan_bwd(const SelectiveScanBwdParams& params, const DeviceLimits& device, KernelChoice choice);

// Whether a tensor can be moved as the plan moves the others.
template <typename Scalar>
bool has_layout(const SequenceView& view, const sequential::ScanPlan& plan);

}  // namespace ssm_kernels::selective_scan
