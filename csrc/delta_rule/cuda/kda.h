// Parameters of the kernels of the delta rule with a gate per channel of the key (Kimi Delta Attention), and the bytes of their
// workspaces.
#pragma once

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Bytes of the operands of a chunk of a value head (kda_chunk.cuh): three tiles of kStateColumns columns and one of kChunk
// columns, all of 16 bits, the decays of the channels, and a flag in 128 bytes.
constexpr int64_t kKdaChunkBytes = (3 * kStateColumns + kChunk) * kChunk * 2 + kStateColumns * 4 + 128;

// The same for backward: another tile of kChunk columns, and betas.
constexpr int64_t kKdaBwdChunkBytes = (3 * kStateColumns + 2 * kChunk) * kChunk * 2 + (kStateColumns + kChunk) * 4 + 128;

// The kernels compute norms of q and k, log decays of g and writing strengths of beta as they read the arguments.
// g has rows of dstate elements and beta rows of one, of value heads; dt_bias has dstate elements a head.
struct KdaArguments {
  RowsView q, k;  // rows of fp16 or bf16 that are whole vectors of 16 bytes
  bool qk_l2norm = false;
  bool gate_is_fp32 = false, beta_is_fp32 = false;  // else of the inputs' type
  DeltaRuleGateOptions options;
};

// Parameters of the kernel that computes the operands of all chunks (kda_chunks.cuh). Of ChunkedGeometry it reads batch,
// seqlen, heads and dstate.
struct KdaChunksParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  float scale = 1;
  RowsView log_decay, beta;  // the arguments g and beta
  KdaArguments arguments;
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  void* inverses = nullptr;  // as in DeltaRuleMatricesParams
  void* chunks = nullptr;    // (chunk_numbers, heads, kKdaChunkBytes), aligned to 128 bytes
};

// Parameters of the scan (kda_fwd_sm90.cuh). It reads neither log_decay, beta and scale, nor the descriptors of q and k.
struct KdaFwdParams : DeltaRuleFwdParams {
  const void* chunks = nullptr;  // as in KdaChunksParams
};

// Parameters of backward's kernels. `matrices` are (chunk_numbers, heads, kKdaBwdChunkBytes). log_decay and beta are the
// arguments g and beta; grad_log_decay and grad_beta are the gradients of these, of their types. The kernels do not read the
// descriptors of q and k.
struct KdaBwdParams : DeltaRuleBwdParams {
  KdaArguments arguments;
  // (chunk_numbers, heads, 2, dstate): parts of the gradients of A_log, a channel, and of dt_bias; null: not needed.
  float* gate_sums = nullptr;
};

SSM_KERNEL_STRUCT(KdaBwdParams, 1792);
SSM_KERNEL_STRUCT(KdaChunksParams, 248);
SSM_KERNEL_STRUCT(KdaFwdParams, 896);

// Queues the kernel that computes the operands of all chunks. `Scalar` is __half or __nv_bfloat16, here and below.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_kda_chunks(const KdaChunksParams& params, cudaStream_t stream);

// Queues the scan. With states_only it writes the final states alone. With follows_chunks it may start before the stream's
// previous kernel, that of the operands, has finished.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_kda_fwd(const KdaFwdParams& params, const Schedule& schedule, bool states_only,
                                          bool follows_chunks, cudaStream_t stream);

// Queues the three kernels of backward (kda_bwd.cuh): with has_matrices not the first, whose results `params` has then, and
// without a workspace of states not the last.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_kda_bwd(const KdaBwdParams& params, const WorkPartition& partition, bool has_matrices,
                                          cudaStream_t stream);

}  // namespace ssm_kernels::delta_rule
