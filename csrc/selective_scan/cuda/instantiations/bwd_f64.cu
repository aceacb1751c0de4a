#include "selective_scan/cuda/bwd.cuh"

namespace ssm_kernels::selective_scan {

template int64_t warp_scan::shared_bytes<double>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&);
template cudaError_t launch_bwd<double>(const SelectiveScanBwdParams&, const Plan&, const PartialSums&, cudaStream_t);
template cudaError_t launch_carry_pass<double>(const SelectiveScanBwdParams&, const Plan&, cudaStream_t);
template cudaError_t launch_bwd_reduce<double>(const SelectiveScanBwdParams&, const PartialSums&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
