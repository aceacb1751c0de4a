#include "causal_conv1d/cuda/launch.cuh"

namespace ssm_kernels::causal_conv1d {

SSM_INSTANTIATE_CAUSAL_CONV1D(__half)

}  // namespace ssm_kernels::causal_conv1d
