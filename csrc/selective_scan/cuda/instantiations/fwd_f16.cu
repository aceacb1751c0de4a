#include "selective_scan/cuda/fwd.cuh"

namespace ssm_kernels::selective_scan {

template int64_t warp_scan::shared_bytes<__half>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&);
template int64_t sequential::shared_bytes<__half>(const SelectiveScanFwdParams&);
template cudaError_t launch_fwd<__half>(const SelectiveScanFwdParams&, const Plan&, cudaStream_t);
template cudaError_t launch_carry_pass<__half>(const SelectiveScanFwdParams&, const Plan&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
