#include "delta_rule/cuda/sm80.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_sm80_matrices<__nv_bfloat16>(const DeltaRuleSm80Params&, cudaStream_t);
template cudaError_t launch_delta_rule_sm80_fwd<__nv_bfloat16>(const DeltaRuleSm80Params&, const WorkPartition&, int,
                                                               cudaStream_t);
template cudaError_t launch_delta_rule_sm80_bwd<__nv_bfloat16>(const DeltaRuleSm80Params&, const WorkPartition&, int,
                                                               cudaStream_t);

}  // namespace ssm_kernels::delta_rule
