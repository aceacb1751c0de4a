#include "selective_scan/cuda/instantiate_bwd.cuh"

namespace ssm_kernels::selective_scan {

using Scalar = __nv_bfloat16;
SSM_INSTANTIATE_BWD

}  // namespace ssm_kernels::selective_scan
