// Parameters of the kernels of the delta rule with a gate per channel of the key (Kimi Delta Attention), and the bytes of their
// workspaces.
#pragma once

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Bytes of the operands of a chunk of a value head (kda_chunk.cuh): three tiles of kStateColumns columns and one of kChunk
// columns, all of 16 bits, and the decays of the channels.
constexpr int64_t kKdaChunkBytes = (3 * kStateColumns + kChunk) * kChunk * 2 + kStateColumns * 4;

// The same for backward: another tile of kChunk columns, and betas.
constexpr int64_t kKdaBwdChunkBytes = (3 * kStateColumns + 2 * kChunk) * kChunk * 2 + (kStateColumns + kChunk) * 4;

// Parameters of the kernel that computes the operands of all chunks (kda_chunks.cuh). Of ChunkedGeometry it reads batch,
// seqlen, heads and dstate.
struct KdaChunksParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  float scale = 1;
  RowsView q, k;       // rows of fp16 or bf16 that are whole vectors of 16 bytes
  RowsView log_decay;  // rows of dstate fp32 elements, of value heads
  RowsView beta;       // rows of one fp32 element
  const int64_t* cu_seqlens = nullptr;
  void* inverses = nullptr;  // as in DeltaRuleMatricesParams
  void* chunks = nullptr;    // (chunk_numbers, heads, kKdaChunkBytes), aligned to 128 bytes
};

// Parameters of the scan (kda_fwd_sm90.cuh). It reads neither log_decay, beta and scale, nor the descriptors of q and k.
struct KdaFwdParams : DeltaRuleFwdParams {
  const void* chunks = nullptr;  // as in KdaChunksParams
};

// Parameters of backward's kernels. `matrices` are (chunk_numbers, heads, kKdaBwdChunkBytes); rows of log_decay and
// grad_log_decay have dstate fp32 elements. The kernels do not read the descriptors of q and k.
struct KdaBwdParams : DeltaRuleBwdParams {
  RowsView q, k;  // as in KdaChunksParams
};

SSM_KERNEL_STRUCT(KdaBwdParams, 1152);
SSM_KERNEL_STRUCT(KdaChunksParams, 208);
SSM_KERNEL_STRUCT(KdaFwdParams, 1408);

// Queues the kernel that computes the operands of all chunks. `Scalar` is __half or __nv_bfloat16, here and below.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_kda_chunks(const KdaChunksParams& params, cudaStream_t stream);

// Queues the scan, which may start before the stream's previous kernel, that of the operands, has finished.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_kda_fwd(const KdaFwdParams& params, const Schedule& schedule, cudaStream_t stream);

// Queues the three kernels of backward (kda_bwd.cuh).
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_kda_bwd(const KdaBwdParams& params, const WorkPartition& partition, cudaStream_t stream);

}  // namespace ssm_kernels::delta_rule
