#include "mamba3/cuda/step.cuh"

// All types in one unit: the headers take most of the compiler's time for one of them.
namespace ssm_kernels::mamba3::step {

template cudaError_t launch_mamba3_step<__nv_bfloat16, float>(const StepParams&, cudaStream_t);
template cudaError_t launch_mamba3_step<__nv_bfloat16, __nv_bfloat16>(const StepParams&, cudaStream_t);
template cudaError_t launch_mamba3_step<__half, float>(const StepParams&, cudaStream_t);
template cudaError_t launch_mamba3_step<__half, __half>(const StepParams&, cudaStream_t);
template cudaError_t launch_mamba3_step<float, float>(const StepParams&, cudaStream_t);

}  // namespace ssm_kernels::mamba3::step
