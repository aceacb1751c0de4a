#include "delta_rule/cuda/bwd.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_bwd<__half>(const DeltaRuleBwdParams&, const WorkPartition&, bool, int, cudaStream_t);
template cudaError_t launch_delta_rule_gate_grads<__half>(const DeltaRuleGateGradsParams&, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
