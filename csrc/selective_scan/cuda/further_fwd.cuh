// Launches of the selective scan's forward for the methods of SSM_FURTHER_DISCRETIZATIONS, which have the sequential scan and
// the warp scan.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/sequential_fwd.cuh"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template <typename Scalar>
cudaError_t launch_further_fwd(const SelectiveScanFwdParams& params, const MethodParameters& parameters, const Plan& plan,
                               cudaStream_t stream) {
  if constexpr (kHasAllScans<Scalar>) {
    if (plan.is_sequential) return sequential::launch_further_fwd<Scalar>(params, parameters, plan.sequential, stream);
  }
  const auto launch = [&](const warp_scan::ScanPlan& pass) {
    return warp_scan::launch_further_fwd<Scalar>(params, parameters, pass, stream);
  };
  const cudaError_t error = warp_scan::launch_carry_pass(plan.warp_scan, 0, launch);
  return error == cudaSuccess ? launch(plan.warp_scan) : error;
}

template <typename Scalar>
cudaError_t launch_further_carry_pass(const SelectiveScanFwdParams& params, const MethodParameters& parameters,
                                      const Plan& plan, cudaStream_t stream) {
  return warp_scan::launch_further_fwd<Scalar>(params, parameters, plan.warp_scan, stream);
}

}  // namespace ssm_kernels::selective_scan
