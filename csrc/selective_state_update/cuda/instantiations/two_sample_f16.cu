#include "selective_state_update/cuda/two_sample.cuh"

namespace ssm_kernels::selective_state_update {

template cudaError_t launch_two_sample_update<__half, float>(const StateUpdateParams&, const TwoSampleParams&,
                                                             const TokenParams*, cudaStream_t);
template cudaError_t launch_two_sample_update<__half, __half>(const StateUpdateParams&, const TwoSampleParams&,
                                                              const TokenParams*, cudaStream_t);

}  // namespace ssm_kernels::selective_state_update
