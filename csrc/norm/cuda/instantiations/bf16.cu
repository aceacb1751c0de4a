#include "norm/cuda/bwd.cuh"
#include "norm/cuda/fwd.cuh"

namespace ssm_kernels::norm {

template cudaError_t launch_norm_fwd<__nv_bfloat16>(const NormFwdParams&, const FwdPlan&, cudaStream_t);
template cudaError_t launch_norm_bwd<__nv_bfloat16>(const NormBwdParams&, const BwdPlan&, cudaStream_t);

}  // namespace ssm_kernels::norm
