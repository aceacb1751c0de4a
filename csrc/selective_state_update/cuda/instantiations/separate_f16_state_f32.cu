#include "selective_state_update/cuda/separate.cuh"

namespace ssm_kernels::selective_state_update {

template cudaError_t launch_separate_update<__half, float>(const StateUpdateParams&, const TwoSampleParams&, const TokenParams*,
                                                           cudaStream_t);

}  // namespace ssm_kernels::selective_state_update
