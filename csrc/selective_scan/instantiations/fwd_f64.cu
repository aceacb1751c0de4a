#include "selective_scan/time_lanes_fwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t time_lanes::fwd_shared_bytes<double>(const SelectiveScanFwdParams&, const time_lanes::ScanPlan&);

#define SSM_ROW(enumerator, name, Method)                                                                                 \
  template cudaError_t time_lanes::launch_fwd<double, Method>(const SelectiveScanFwdParams&, const time_lanes::ScanPlan&, \
                                                              cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
