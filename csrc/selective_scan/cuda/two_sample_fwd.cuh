// Launches of the selective scan's forward for the methods of SSM_TWO_SAMPLE_DISCRETIZATIONS, which have the sequential scan
// and the warp scan.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/two_sample_sequential_fwd.cuh"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template <typename Scalar>
cudaError_t launch_two_sample_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two, const Plan& plan,
                                  cudaStream_t stream) {
  if constexpr (kHasAllScans<Scalar>) {
    if (plan.is_sequential) return sequential::launch_two_sample_fwd<Scalar>(params, two, plan.sequential, stream);
  }
  const auto launch = [&](const warp_scan::ScanPlan& pass) {
    return warp_scan::launch_two_sample_fwd<Scalar>(params, two, pass, stream);
  };
  const cudaError_t error = warp_scan::launch_carry_pass(plan.warp_scan, 0, launch);
  return error == cudaSuccess ? launch(plan.warp_scan) : error;
}

}  // namespace ssm_kernels::selective_scan
