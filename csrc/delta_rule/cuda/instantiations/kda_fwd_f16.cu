#include "delta_rule/cuda/kda_fwd.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_kda_chunks<__half>(const KdaChunksParams&, cudaStream_t);
template cudaError_t launch_kda_fwd<__half>(const KdaFwdParams&, const Schedule&, bool, bool, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
