#include "norm/cuda/bwd.cuh"
#include "norm/cuda/fwd.cuh"

namespace ssm_kernels::norm {

template cudaError_t launch_norm_fwd<__half>(const NormFwdParams&, const FwdPlan&, cudaStream_t);
template cudaError_t launch_norm_bwd<__half>(const NormBwdParams&, const BwdPlan&, cudaStream_t);

}  // namespace ssm_kernels::norm
