#include "mlstm/cuda/step.cuh"

namespace ssm_kernels::mlstm::step {

template cudaError_t launch_mlstm_step<float, float>(const StepParams&, void*, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm::step
