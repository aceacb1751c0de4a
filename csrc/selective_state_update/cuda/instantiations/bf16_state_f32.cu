#include "selective_state_update/cuda/update.cuh"

namespace ssm_kernels::selective_state_update {

#define SSM_ROW(enumerator, name, Method)                                                                            \
  template cudaError_t launch_selective_state_update<__nv_bfloat16, float, Method>(const StateUpdateParams&, Tiling, \
                                                                                   cudaStream_t);
SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW

}  // namespace ssm_kernels::selective_state_update
