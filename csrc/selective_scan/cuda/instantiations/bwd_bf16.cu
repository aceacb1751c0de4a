#include "selective_scan/cuda/bwd_finish.cuh"
#include "selective_scan/cuda/sequential_bwd.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

namespace ssm_kernels::selective_scan {

template size_t warp_scan::bwd_shared_bytes<__nv_bfloat16>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&);
template size_t sequential::bwd_shared_bytes<__nv_bfloat16>();
template cudaError_t launch_bwd_finish<__nv_bfloat16>(const SelectiveScanBwdParams&, const PartialSums&, cudaStream_t);

#define SSM_ROW(enumerator, name, Method)                                                                                      \
  template cudaError_t warp_scan::launch_bwd<__nv_bfloat16, Method>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&, \
                                                                    const PartialSums&, cudaStream_t);                         \
  template cudaError_t sequential::launch_bwd<__nv_bfloat16, Method>(                                                          \
      const SelectiveScanBwdParams&, const sequential::ScanPlan&, const PartialSums&, cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_scan
