#include "ssd/cuda/ranks.cuh"

namespace ssm_kernels::ssd {

#define SSM_INSTANTIATE_RANKS(Scalar)                                                       \
  template cudaError_t launch_rank_inputs<Scalar>(const RankParams&, cudaStream_t);         \
  template cudaError_t launch_rank_outputs<Scalar>(const RankParams&, cudaStream_t);        \
  template cudaError_t launch_rank_outputs_bwd<Scalar>(const RankBwdParams&, cudaStream_t); \
  template cudaError_t launch_rank_inputs_bwd<Scalar>(const RankBwdParams&, cudaStream_t);

SSM_INSTANTIATE_RANKS(float)
SSM_INSTANTIATE_RANKS(__half)
SSM_INSTANTIATE_RANKS(__nv_bfloat16)

}  // namespace ssm_kernels::ssd
