// Launches of the selective scan's forward.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/sequential_fwd.cuh"
#include "selective_scan/cuda/short_scan_fwd.cuh"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template <typename Scalar>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream) {
  check_known(params.discretization);
  if constexpr (kHasAllScans<Scalar>) {
    if (plan.is_short) return short_scan::launch_fwd<Scalar>(params, plan.short_scan, stream);
  }
  cudaError_t error = cudaSuccess;
  visit_basic_discretization(params.discretization, [&](auto rule) {
    using Method = decltype(rule);
    if constexpr (kHasAllScans<Scalar>) {
      if (plan.is_sequential) {
        error = sequential::launch_fwd<Scalar, Method>(params, plan.sequential, stream);
        return;
      }
    }
    const auto launch = [&](const warp_scan::ScanPlan& pass) {
      return warp_scan::launch_fwd<Scalar, Method>(params, pass, stream);
    };
    if (!plan.has_segment_maps) error = warp_scan::launch_carry_pass(plan.warp_scan, 0, launch);
    if (error == cudaSuccess) error = launch(plan.warp_scan);
  });
  return error;
}

template <typename Scalar>
cudaError_t launch_carry_pass(const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  visit_basic_discretization(params.discretization, [&](auto rule) {
    error = warp_scan::launch_fwd<Scalar, decltype(rule)>(params, plan.warp_scan, stream);
  });
  return error;
}

}  // namespace ssm_kernels::selective_scan
