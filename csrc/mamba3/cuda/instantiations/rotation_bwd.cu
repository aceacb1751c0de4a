#include "mamba3/cuda/rotation_bwd.cuh"

namespace ssm_kernels::mamba3 {

template cudaError_t launch_unrotate<float>(const UnrotateParams&, bool, cudaStream_t);
template cudaError_t launch_unrotate<__half>(const UnrotateParams&, bool, cudaStream_t);
template cudaError_t launch_unrotate<__nv_bfloat16>(const UnrotateParams&, bool, cudaStream_t);

}  // namespace ssm_kernels::mamba3
