#include "mlstm/cuda/step.cuh"

namespace ssm_kernels::mlstm::step {

template cudaError_t launch_mlstm_step<__half, float>(const StepParams&, void*, bool, cudaStream_t);
template cudaError_t launch_mlstm_step<__half, __half>(const StepParams&, void*, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm::step
