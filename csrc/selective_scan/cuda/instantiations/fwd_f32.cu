#include "selective_scan/cuda/sequential_fwd.cuh"
#include "selective_scan/cuda/short_scan_fwd.cuh"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t warp_scan::fwd_shared_bytes<float>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&);
template size_t sequential::fwd_shared_bytes<float>(const SelectiveScanFwdParams&);
template cudaError_t short_scan::launch_fwd<float>(const SelectiveScanFwdParams&, const short_scan::ScanPlan&, cudaStream_t);

#define SSM_ROW(enumerator, name, Method)                                                                                \
  template cudaError_t warp_scan::launch_fwd<float, Method>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&,   \
                                                            cudaStream_t);                                               \
  template cudaError_t sequential::launch_fwd<float, Method>(const SelectiveScanFwdParams&, const sequential::ScanPlan&, \
                                                             cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
