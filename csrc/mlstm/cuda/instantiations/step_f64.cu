#include "mlstm/cuda/step.cuh"

namespace ssm_kernels::mlstm::step {

template cudaError_t launch_mlstm_step<double, double>(const StepParams&, void*, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm::step
