#include "selective_state_update/cuda/complex.cuh"

namespace ssm_kernels::selective_state_update {

template cudaError_t launch_complex_update<__nv_bfloat16>(const StateUpdateParams&, const TwoSampleParams&, const TokenParams*,
                                                          cudaStream_t);

}  // namespace ssm_kernels::selective_state_update
