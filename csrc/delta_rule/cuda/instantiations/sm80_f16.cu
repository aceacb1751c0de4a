#include "delta_rule/cuda/sm80.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_sm80_matrices<__half>(const DeltaRuleSm80Params&, cudaStream_t);
template cudaError_t launch_delta_rule_sm80_fwd<__half>(const DeltaRuleSm80Params&, const WorkPartition&, int, cudaStream_t);
template cudaError_t launch_delta_rule_sm80_bwd<__half>(const DeltaRuleSm80Params&, const WorkPartition&, int, cudaStream_t);

}  // namespace ssm_kernels::delta_rule
