#include "selective_scan/cuda/warp_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t warp_scan::fwd_shared_bytes<double>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&);

#define SSM_ROW(enumerator, name, Method)                                                                               \
  template cudaError_t warp_scan::launch_fwd<double, Method>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&, \
                                                             cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
