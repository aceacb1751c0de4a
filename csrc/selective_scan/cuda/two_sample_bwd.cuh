// Launches of the selective scan's backward for the methods of SSM_TWO_SAMPLE_DISCRETIZATIONS, which have the sequential scan
// and the warp scan.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/two_sample_sequential_bwd.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

namespace ssm_kernels::selective_scan {

// bwd_reduce.cuh, which bwd_*.cu instantiate.
template <typename Scalar>
cudaError_t launch_bwd_reduce(const SelectiveScanBwdParams& params, const PartialSums& partial_sums, cudaStream_t stream);

template <typename Scalar>
cudaError_t launch_two_sample_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two, const Plan& plan,
                                  const PartialSums& partial_sums, cudaStream_t stream) {
  const auto launch_scan = [&] {
    if (params.rows == 0) return cudaSuccess;
    const auto launch = [&](const warp_scan::ScanPlan& pass) {
      return warp_scan::launch_two_sample_bwd<Scalar>(params, two, pass, partial_sums, stream);
    };
    const cudaError_t error = warp_scan::launch_carry_pass(plan.warp_scan, 1, launch);
    if (error != cudaSuccess) return error;
    if constexpr (kHasAllScans<Scalar>) {
      if (plan.is_sequential) {
        return sequential::launch_two_sample_bwd<Scalar>(params, two, plan.sequential, partial_sums, stream);
      }
    }
    return launch(plan.warp_scan);
  };
  const cudaError_t error = launch_scan();
  return error == cudaSuccess ? launch_bwd_reduce<Scalar>(params, partial_sums, stream) : error;
}

}  // namespace ssm_kernels::selective_scan
