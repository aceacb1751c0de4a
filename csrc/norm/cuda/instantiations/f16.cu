#include "norm/cuda/bwd.cuh"
#include "norm/cuda/fwd.cuh"

namespace ssm_kernels::norm {

template cudaError_t launch_norm_fwd<__half>(const NormFwdParams&, const FwdPlan&, cudaStream_t);
template cudaError_t launch_norm_bwd<__half>(const NormBwdParams&, const BwdPlan&, cudaStream_t);
template int count_norm_rms_fwd_clusters<__half>(const RmsPlan&);
template int count_norm_rms_bwd_clusters<__half>(const RmsPlan&);
template int count_norm_bwd_clusters<__half>(const NormBwdParams&, const BwdPlan&);

}  // namespace ssm_kernels::norm
