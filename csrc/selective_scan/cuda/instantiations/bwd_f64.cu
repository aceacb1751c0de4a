#include "selective_scan/cuda/bwd_reduce.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t warp_scan::bwd_shared_bytes<double>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&);
template cudaError_t launch_bwd_reduce<double>(const SelectiveScanBwdParams&, const PartialSums&, cudaStream_t);

#define SSM_ROW(enumerator, name, Method)                                                                               \
  template cudaError_t warp_scan::launch_bwd<double, Method>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&, \
                                                             const PartialSums&, cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
