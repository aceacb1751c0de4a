#include "norm/cuda/bwd.cuh"
#include "norm/cuda/fwd.cuh"

namespace ssm_kernels::norm {

template cudaError_t launch_norm_fwd<float>(const NormFwdParams&, const FwdPlan&, cudaStream_t);
template cudaError_t launch_norm_bwd<float>(const NormBwdParams&, const BwdPlan&, cudaStream_t);
template int count_norm_rms_fwd_clusters<float>(const RmsPlan&);
template int count_norm_rms_bwd_clusters<float>(const RmsPlan&);
template int count_norm_bwd_clusters<float>(const NormBwdParams&, const BwdPlan&);
template cudaError_t launch_norm_sum<float>(const NormBwdParams&, cudaStream_t);

}  // namespace ssm_kernels::norm
