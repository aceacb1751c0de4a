// The interface between the host code that launches the delta rule's kernels (launch_fwd.cpp) and the kernels.
#pragma once

#include "common/kernel_abi.h"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Queues the kernel on the stream. Instantiated for __half and __nv_bfloat16, on devices for which has_wgmma_kernels(). With
// states_only it writes the final states alone. follows_matrices: whether the stream's previous kernel computes the chunks'
// matrices, so that this one may start before it has finished.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_fwd(const DeltaRuleFwdParams& params, const Schedule& schedule, bool states_only,
                                                 bool follows_matrices, cudaStream_t stream);

// Queues the kernel that folds the maps of segments (cuda/segment_fold.cuh).
SSM_KERNEL_API cudaError_t launch_delta_rule_fold(const DeltaRuleFoldParams& params, cudaStream_t stream);

// Queues the kernel that computes the matrices of all chunks; for the same types and devices.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_chunk_matrices(const DeltaRuleMatricesParams& params, cudaStream_t stream);

// Queues the kernels of backward. `multiprocessors` of the device: each chunk is computed by one of as many blocks.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_bwd(const DeltaRuleBwdParams& params, const WorkPartition& partition,
                                                 int multiprocessors, cudaStream_t stream);

SSM_KERNEL_API bool has_wgmma_kernels();

}  // namespace ssm_kernels::delta_rule
