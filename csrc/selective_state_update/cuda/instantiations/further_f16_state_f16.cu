#include "selective_state_update/cuda/update.cuh"

namespace ssm_kernels::selective_state_update {

template cudaError_t launch_further_state_update<__half, __half>(const StateUpdateParams&, const MethodParameters&,
                                                                 const TokenParams*, const Tiling&, cudaStream_t);

}  // namespace ssm_kernels::selective_state_update
