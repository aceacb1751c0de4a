// Launches of the selective scan's forward with a step of its own for A (separate_forms.cuh), by the warp scan.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template <typename Scalar>
cudaError_t launch_separate_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two, const Plan& plan,
                                cudaStream_t stream) {
  const auto launch = [&](const warp_scan::ScanPlan& pass) {
    return warp_scan::launch_separate_fwd<Scalar>(params, two, pass, stream);
  };
  const cudaError_t error = warp_scan::launch_carry_pass(plan.warp_scan, 0, launch);
  return error == cudaSuccess ? launch(plan.warp_scan) : error;
}

}  // namespace ssm_kernels::selective_scan
