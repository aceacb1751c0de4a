// Launches of the selective scan's backward with a step of its own for A (separate_forms.cuh), by the warp scan.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

namespace ssm_kernels::selective_scan {

// bwd_reduce.cuh, which bwd_*.cu instantiate.
template <typename Scalar>
cudaError_t launch_bwd_reduce(const SelectiveScanBwdParams& params, const PartialSums& partial_sums, cudaStream_t stream);

template <typename Scalar>
cudaError_t launch_separate_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two, const Plan& plan,
                                const PartialSums& partial_sums, cudaStream_t stream) {
  const auto launch_scan = [&] {
    if (params.rows == 0) return cudaSuccess;
    const auto launch = [&](const warp_scan::ScanPlan& pass) {
      return warp_scan::launch_separate_bwd<Scalar>(params, two, pass, partial_sums, stream);
    };
    const cudaError_t error = warp_scan::launch_carry_pass(plan.warp_scan, 1, launch);
    return error == cudaSuccess ? launch(plan.warp_scan) : error;
  };
  const cudaError_t error = launch_scan();
  return error == cudaSuccess ? launch_bwd_reduce<Scalar>(params, partial_sums, stream) : error;
}

}  // namespace ssm_kernels::selective_scan
