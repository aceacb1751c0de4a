#include "delta_rule/cuda/wide.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_wide_matrices<__nv_bfloat16>(const DeltaRuleBwdParams&, cudaStream_t);
template cudaError_t launch_delta_rule_fwd_wide<__nv_bfloat16>(const DeltaRuleFwdParams&, const Schedule&, cudaStream_t);
template cudaError_t launch_delta_rule_bwd_wide_states<__nv_bfloat16>(const DeltaRuleBwdParams&, const WorkPartition&,
                                                                      cudaStream_t);
template cudaError_t launch_delta_rule_bwd_wide_chunks<__nv_bfloat16>(const DeltaRuleBwdParts&, int, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
