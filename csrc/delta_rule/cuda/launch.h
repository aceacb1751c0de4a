// The interface between the delta rule's kernels and the host code that launches them (launch_fwd.cpp, launch_bwd.cpp).
#pragma once

#include "common/kernel_abi.h"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Queues forward's kernel (fwd_sm90.cuh) on the stream. Templates are instantiated for __half and __nv_bfloat16; all kernels
// need a device for which has_wgmma_kernels(). With states_only the kernel writes the final states alone. With follows_matrices
// it may start before the stream's previous kernel, which computes the chunk matrices, has finished.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_fwd(const DeltaRuleFwdParams& params, const Schedule& schedule, bool states_only,
                                                 bool follows_matrices, cudaStream_t stream);

// Queue the kernels that cut sequences into segments, and that fold the maps of segments (segment_fold.cuh).
SSM_KERNEL_API cudaError_t launch_delta_rule_segments(const DeltaRuleSegmentsParams& params, cudaStream_t stream);
SSM_KERNEL_API cudaError_t launch_delta_rule_fold(const DeltaRuleFoldParams& params, cudaStream_t stream);

// Queues the kernel that computes forward's matrices of all chunks (chunk_matrices_sm90.cuh).
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_chunk_matrices(const DeltaRuleMatricesParams& params, cudaStream_t stream);

// Queues the kernel that computes the factors of rows, the log decays and beta (step_factors.cuh).
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_factors(const DeltaRuleFactorsParams& params, cudaStream_t stream);

// Queues the kernel that makes gradients of g, beta, A_log and dt_bias of those of log decays and beta (gate_gradients.cuh).
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_gate_grads(const DeltaRuleGateGradsParams& params, cudaStream_t stream);

// Queues the kernel that applies the norms to gradients of rows (row_gradients.cuh), for __nv_bfloat16 alone.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_row_grads(const DeltaRuleRowGradsParams& params, cudaStream_t stream);

// Queues the three kernels of backward (bwd.cuh): with has_matrices not the first, whose results `params` has then, and without
// a workspace of states not the last. The last has a block for each of the device's `multiprocessors`, which takes
// all value heads of a key head together.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_bwd(const DeltaRuleBwdParams& params, const WorkPartition& partition,
                                                 bool has_matrices, int multiprocessors, cudaStream_t stream);

// Keys of 129 to 256 columns (wide.cuh). Queue the kernel that computes the matrices N and P and the tables of all chunks,
// which the others read; forward's kernel; backward's kernel of the states; and that of the gradients, which takes
// kStateColumns columns of the keys or fewer at a time.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_wide_matrices(const DeltaRuleBwdParams& params, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_fwd_wide(const DeltaRuleFwdParams& params, const Schedule& schedule,
                                                      cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_bwd_wide_states(const DeltaRuleBwdParams& params, const WorkPartition& partition,
                                                             cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_bwd_wide_chunks(const DeltaRuleBwdParts& parts, int multiprocessors,
                                                             cudaStream_t stream);

// Whether the current device can run the kernels.
SSM_KERNEL_API bool has_wgmma_kernels();

}  // namespace ssm_kernels::delta_rule
