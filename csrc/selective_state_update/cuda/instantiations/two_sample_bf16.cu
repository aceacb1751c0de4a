#include "selective_state_update/cuda/two_sample.cuh"

namespace ssm_kernels::selective_state_update {

template cudaError_t launch_two_sample_update<__nv_bfloat16, float>(const StateUpdateParams&, const TwoSampleParams&,
                                                                    const TokenParams*, cudaStream_t);
template cudaError_t launch_two_sample_update<__nv_bfloat16, __nv_bfloat16>(const StateUpdateParams&, const TwoSampleParams&,
                                                                            const TokenParams*, cudaStream_t);

}  // namespace ssm_kernels::selective_state_update
