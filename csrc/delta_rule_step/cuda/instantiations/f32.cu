#include "delta_rule_step/cuda/kernels.cuh"

namespace ssm_kernels::delta_rule_step {

template cudaError_t launch_delta_rule_step<float, float>(const StepParams&, const TokenParams*, const Tiling&, cudaStream_t);

}  // namespace ssm_kernels::delta_rule_step
