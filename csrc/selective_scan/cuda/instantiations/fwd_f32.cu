#include "selective_scan/cuda/instantiate_fwd.cuh"

namespace ssm_kernels::selective_scan {

using Scalar = float;
SSM_INSTANTIATE_FWD

}  // namespace ssm_kernels::selective_scan
