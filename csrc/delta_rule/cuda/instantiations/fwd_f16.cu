#include "delta_rule/cuda/fwd.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_fwd<__half>(const DeltaRuleFwdParams&, const Schedule&, bool, bool, cudaStream_t);
template cudaError_t launch_delta_rule_chunk_matrices<__half>(const DeltaRuleMatricesParams&, cudaStream_t);
template cudaError_t launch_delta_rule_factors<__half>(const DeltaRuleFactorsParams&, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
