#include "norm/cuda/bwd.cuh"
#include "norm/cuda/fwd.cuh"

namespace ssm_kernels::norm {

template cudaError_t launch_norm_fwd<__nv_bfloat16>(const NormFwdParams&, const FwdPlan&, cudaStream_t);
template cudaError_t launch_norm_bwd<__nv_bfloat16>(const NormBwdParams&, const BwdPlan&, cudaStream_t);
template int count_norm_rms_fwd_clusters<__nv_bfloat16>(const RmsPlan&);
template int count_norm_rms_bwd_clusters<__nv_bfloat16>(const RmsPlan&);
template int count_norm_bwd_clusters<__nv_bfloat16>(const NormBwdParams&, const BwdPlan&);

}  // namespace ssm_kernels::norm
