#include "selective_scan/selective_scan_fwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t fwd_shared_bytes<__half>(const SelectiveScanFwdParams&, const ScanPlan&);

#define SSM_ROW(enumerator, name, Method) \
  template cudaError_t launch_fwd<__half, Method>(const SelectiveScanFwdParams&, const ScanPlan&, cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
