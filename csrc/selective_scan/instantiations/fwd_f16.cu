#include "selective_scan/sequential_fwd.cuh"
#include "selective_scan/time_lanes_fwd.cuh"
#include "selective_scan/walking_fwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t time_lanes::fwd_shared_bytes<__half>(const SelectiveScanFwdParams&, const time_lanes::ScanPlan&);
template size_t walking::fwd_shared_bytes<__half>(const SelectiveScanFwdParams&);
template cudaError_t sequential::launch_fwd<__half>(const SelectiveScanFwdParams&, const sequential::ScanPlan&, cudaStream_t);

#define SSM_ROW(enumerator, name, Method)                                                                                 \
  template cudaError_t time_lanes::launch_fwd<__half, Method>(const SelectiveScanFwdParams&, const time_lanes::ScanPlan&, \
                                                              cudaStream_t);                                              \
  template cudaError_t walking::launch_fwd<__half, Method>(const SelectiveScanFwdParams&, const walking::ScanPlan&,       \
                                                           cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
