#include "mlstm/cuda/step.cuh"

namespace ssm_kernels::mlstm::step {

template cudaError_t launch_mlstm_step<__nv_bfloat16, float>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<__nv_bfloat16, __nv_bfloat16>(const StepParams&, void*, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm::step
