#include "delta_rule/cuda/kda_bwd.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_kda_bwd<__half>(const KdaBwdParams&, const WorkPartition&, bool, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
