#include "selective_scan/cuda/bwd.cuh"

namespace ssm_kernels::selective_scan {

template int64_t warp_scan::shared_bytes<float>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&);
template int64_t sequential::shared_bytes<float>(const SelectiveScanBwdParams&);
template cudaError_t launch_bwd<float>(const SelectiveScanBwdParams&, const Plan&, const PartialSums&, cudaStream_t);
template cudaError_t launch_carry_pass<float>(const SelectiveScanBwdParams&, const Plan&, cudaStream_t);
template cudaError_t launch_bwd_reduce<float>(const SelectiveScanBwdParams&, const PartialSums&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
