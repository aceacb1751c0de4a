// Launches of the selective scan's backward.
#pragma once

#include "selective_scan/cuda/bwd_reduce.cuh"
#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/sequential_bwd.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

namespace ssm_kernels::selective_scan {

template <typename Scalar>
cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const Plan& plan, const PartialSums& partial_sums,
                       cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  visit_basic_discretization(params.discretization, [&](auto rule) {
    using Method = decltype(rule);
    if (params.rows == 0) return;
    const auto launch = [&](const warp_scan::ScanPlan& pass) {
      return warp_scan::launch_bwd<Scalar, Method>(params, pass, partial_sums, stream);
    };
    if (!plan.has_segment_maps) error = warp_scan::launch_carry_pass(plan.warp_scan, 1, launch);
    if (error != cudaSuccess) return;
    if constexpr (kHasAllScans<Scalar>) {
      if (plan.is_sequential) {
        error = sequential::launch_bwd<Scalar, Method>(params, plan.sequential, partial_sums, stream);
        return;
      }
    }
    error = launch(plan.warp_scan);
  });
  return error == cudaSuccess ? launch_bwd_reduce<Scalar>(params, partial_sums, stream) : error;
}

template <typename Scalar>
cudaError_t launch_carry_pass(const SelectiveScanBwdParams& params, const Plan& plan, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  visit_basic_discretization(params.discretization, [&](auto rule) {
    error = warp_scan::launch_bwd<Scalar, decltype(rule)>(params, plan.warp_scan, PartialSums(), stream);
  });
  return error;
}

}  // namespace ssm_kernels::selective_scan
