#include "causal_conv1d/cuda/causal_conv1d_launch.cuh"

namespace ssm_kernels::causal_conv1d {

SSM_INSTANTIATE_CAUSAL_CONV1D(__nv_bfloat16)

}  // namespace ssm_kernels::causal_conv1d
