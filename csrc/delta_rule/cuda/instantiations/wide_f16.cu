#include "delta_rule/cuda/wide.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_wide_matrices<__half>(const DeltaRuleBwdParams&, cudaStream_t);
template cudaError_t launch_delta_rule_fwd_wide<__half>(const DeltaRuleFwdParams&, const Schedule&, cudaStream_t);
template cudaError_t launch_delta_rule_bwd_wide_states<__half>(const DeltaRuleBwdParams&, const WorkPartition&, cudaStream_t);
template cudaError_t launch_delta_rule_bwd_wide_chunks<__half>(const DeltaRuleBwdParts&, int, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
