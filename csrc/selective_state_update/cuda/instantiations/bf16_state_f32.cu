#include "selective_state_update/cuda/step.cuh"
#include "selective_state_update/cuda/update.cuh"

namespace ssm_kernels::selective_state_update {

template cudaError_t launch_selective_state_update<__nv_bfloat16, float>(const StateUpdateParams&, const TokenParams*,
                                                                         const Tiling&, cudaStream_t);
template cudaError_t launch_step<__nv_bfloat16, float>(const StepParams&, const StepTiling&, cudaStream_t);

}  // namespace ssm_kernels::selective_state_update
