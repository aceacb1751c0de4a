// Launches of backward's kernels of the delta rule with a gate per channel of the key.
#pragma once

#include "cuda/chunked/launch_staged.cuh"
#include "delta_rule/cuda/kda_bwd_chunks.cuh"
#include "delta_rule/cuda/kda_bwd_states.cuh"
#include "delta_rule/cuda/kda_launch_chunks.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
cudaError_t launch_kda_bwd(const KdaBwdParams& params, const WorkPartition& partition, bool has_matrices, cudaStream_t stream) {
  KdaChunksParams of_chunks;
  static_cast<ChunkedGeometry&>(of_chunks) = params;
  of_chunks.value_heads_per_key_head = params.value_heads_per_key_head;
  of_chunks.scale = params.scale;
  of_chunks.log_decay = params.log_decay;
  of_chunks.beta = params.beta;
  of_chunks.arguments = params.arguments;
  of_chunks.cu_seqlens = params.cu_seqlens;
  of_chunks.resets = params.resets;
  of_chunks.chunks = params.matrices;
  if (!has_matrices) {
    const cudaError_t error = launch_kda_chunks_kernel<Scalar, /*is_backward=*/true>(of_chunks, stream);
    if (error != cudaSuccess) return error;
  }
  const auto launch_kernel = [&](auto kernel, int64_t blocks, int threads, int bytes, const auto&... arguments) {
    if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
    return cuda::launch(kernel, blocks, threads, bytes, stream, /*uses_pdl=*/false, params, arguments...);
  };
  using States = KdaBwdStates<Scalar>;
  static_assert(States::Shared::bytes() <= kSm90SharedBytes, "a block has that much shared memory");
  if (const cudaError_t error = launch_kernel(kda_bwd_states_kernel<Scalar>, kDirections * partition.work_tiles,
                                              States::kThreads, States::Shared::bytes(), partition);
      error != cudaSuccess || params.states == nullptr) {
    return error;
  }
  using Chunks = KdaBwdChunks<Scalar>;
  static_assert(Chunks::Shared::bytes() <= kSm90SharedBytes, "a block has that much shared memory");
  const int64_t blocks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  return launch_kernel(kda_bwd_chunks_kernel<Scalar>, blocks, Chunks::kThreads, Chunks::Shared::bytes());
}

}  // namespace ssm_kernels::delta_rule
