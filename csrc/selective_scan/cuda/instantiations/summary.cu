#include "selective_scan/cuda/summary.cuh"

namespace ssm_kernels::selective_scan {

#define SSM_DECAYS(Scalar) \
  template cudaError_t launch_exponential_decay<Scalar>(const SelectiveScanParams&, double*, void*, cudaStream_t);
SSM_DECAYS(float)
SSM_DECAYS(double)
SSM_DECAYS(__half)
SSM_DECAYS(__nv_bfloat16)
#undef SSM_DECAYS

template cudaError_t launch_fold<float>(const SelectiveScanParams&, const SegmentFold&, cudaStream_t);
template cudaError_t launch_fold<double>(const SelectiveScanParams&, const SegmentFold&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
