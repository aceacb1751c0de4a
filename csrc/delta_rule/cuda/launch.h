// The interface between the host code that launches the delta rule's kernels (launch_fwd.cpp) and the kernels.
#pragma once

#include "common/kernel_abi.h"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Queues the kernel on the stream. Instantiated for __half and __nv_bfloat16, on devices for which has_wgmma_kernels().
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_fwd(const DeltaRuleFwdParams& params, const Schedule& schedule,
                                                 cudaStream_t stream);

// Queues the kernel that computes the matrices of all chunks; for the same types and devices.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_chunk_matrices(const DeltaRuleMatricesParams& params, cudaStream_t stream);

SSM_KERNEL_API bool has_wgmma_kernels();

}  // namespace ssm_kernels::delta_rule
