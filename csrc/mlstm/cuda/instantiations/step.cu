#include "mlstm/cuda/step.cuh"

// All types in one unit: the headers take two thirds of the compiler's time for one of them.
namespace ssm_kernels::mlstm::step {

template cudaError_t launch_mlstm_step<__nv_bfloat16, float>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<__nv_bfloat16, __nv_bfloat16>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<__half, float>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<__half, __half>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<float, float>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<double, double>(const StepParams&, void*, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm::step
