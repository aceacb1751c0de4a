#include "delta_rule/cuda/fwd.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_fwd<__nv_bfloat16>(const DeltaRuleFwdParams&, const Schedule&, cudaStream_t);
template cudaError_t launch_delta_rule_chunk_matrices<__nv_bfloat16>(const DeltaRuleMatricesParams&, cudaStream_t);

bool has_wgmma_kernels() {
  return cuda::is_compiled_for_threads(delta_rule_fwd_sm90_kernel<__nv_bfloat16, 64>, FwdSm90<__nv_bfloat16, 64>::kThreads);
}

}  // namespace ssm_kernels::delta_rule
