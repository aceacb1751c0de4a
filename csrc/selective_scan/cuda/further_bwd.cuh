// Launches of the selective scan's backward for the methods of SSM_FURTHER_DISCRETIZATIONS, which have the sequential scan and
// the warp scan.
#pragma once

#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/sequential_bwd.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

namespace ssm_kernels::selective_scan {
namespace warp_scan {

template <typename Scalar>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads,
                                  kBwdResidentWarps<Scalar, Pass::kAny> / BwdTileConfig<Scalar>::kWarps)
    warp_scan_further_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params, const __grid_constant__ ScanPlan plan,
                                 const __grid_constant__ PartialSums partial_sums,
                                 const __grid_constant__ MethodParameters parameters) {
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  bwd_block<BwdTileConfig<Scalar>, FurtherMethod, Pass::kAny>(params, plan, partial_sums, memory, parameters);
}

template <typename Scalar>
cudaError_t launch_further_bwd(const SelectiveScanBwdParams& params, const MethodParameters& parameters, const ScanPlan& plan,
                               const PartialSums& partial_sums, cudaStream_t stream) {
  return launch_blocks(warp_scan_further_bwd_kernel<Scalar>, BwdTileConfig<Scalar>::kThreads,
                       shared_bytes<Scalar>(params, plan), stream, params, plan, partial_sums, parameters);
}

}  // namespace warp_scan

// bwd_reduce.cuh, which bwd_*.cu instantiate.
template <typename Scalar>
cudaError_t launch_bwd_reduce(const SelectiveScanBwdParams& params, const PartialSums& partial_sums, cudaStream_t stream);

template <typename Scalar>
cudaError_t launch_further_bwd(const SelectiveScanBwdParams& params, const MethodParameters& parameters, const Plan& plan,
                               const PartialSums& partial_sums, cudaStream_t stream) {
  const auto launch_scan = [&] {
    if (params.rows == 0) return cudaSuccess;
    const auto launch = [&](const warp_scan::ScanPlan& pass) {
      return warp_scan::launch_further_bwd<Scalar>(params, parameters, pass, partial_sums, stream);
    };
    const cudaError_t error = warp_scan::launch_carry_pass(plan.warp_scan, 1, launch);
    if (error != cudaSuccess) return error;
    if constexpr (kHasAllScans<Scalar>) {
      if (plan.is_sequential) {
        return sequential::launch_further_bwd<Scalar>(params, parameters, plan.sequential, partial_sums, stream);
      }
    }
    return launch(plan.warp_scan);
  };
  const cudaError_t error = launch_scan();
  return error == cudaSuccess ? launch_bwd_reduce<Scalar>(params, partial_sums, stream) : error;
}

template <typename Scalar>
cudaError_t launch_further_carry_pass(const SelectiveScanBwdParams& params, const MethodParameters& parameters,
                                      const Plan& plan, cudaStream_t stream) {
  return warp_scan::launch_further_bwd<Scalar>(params, parameters, plan.warp_scan, PartialSums(), stream);
}

}  // namespace ssm_kernels::selective_scan
