#include "selective_scan/cuda/instantiate_bwd.cuh"

namespace ssm_kernels::selective_scan {

using Scalar = float;
SSM_INSTANTIATE_BWD

}  // namespace ssm_kernels::selective_scan
