// The launch of the kernel that computes the operands of all chunks with a gate per channel of the key.
#pragma once

#include "delta_rule/cuda/kda_chunks.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar, bool is_backward>
cudaError_t launch_kda_chunks_kernel(const KdaChunksParams& params, cudaStream_t stream) {
  using Chunks = KdaChunks<Scalar, is_backward>;
  constexpr int kBytes = Chunks::Shared::bytes();
  static_assert(Chunks::kBlocksOfMultiprocessor * (kBytes + 1024) <= kSm90SharedBytes + 1024,
                "a multiprocessor has that much shared memory, of which each block takes 1 KiB more");
  const auto kernel = kda_chunks_kernel<Scalar, is_backward>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  const int64_t blocks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  return cuda::launch(kernel, blocks, Chunks::kThreads, kBytes, stream, /*uses_pdl=*/false, params);
}

}  // namespace ssm_kernels::delta_rule
