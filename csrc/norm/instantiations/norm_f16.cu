#include "norm/norm_bwd.cuh"
#include "norm/norm_fwd.cuh"

namespace ssm_kernels::norm {

template cudaError_t launch_norm_fwd<__half>(const NormFwdParams&, const FwdPlan&, cudaStream_t);
template cudaError_t launch_norm_bwd<__half>(const NormBwdParams&, const BwdPlan&, cudaStream_t);

}  // namespace ssm_kernels::norm
