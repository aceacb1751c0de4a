// Launches of the chunked kernels of mlstm_scan.
#pragma once

#include "cuda/launch.cuh"
#include "mlstm/cuda/chunk_products.cuh"
#include "mlstm/cuda/chunk_tables.cuh"
#include "mlstm/cuda/launch.h"

namespace ssm_kernels::mlstm {

template <typename Shared, typename Kernel, typename... Arguments>
cudaError_t launch_chunked(Kernel* kernel, int64_t blocks, cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kBytes = sizeof(Shared) + cuda::kOperandAlignment;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, blocks, kChunkThreads, kBytes, stream, false, arguments...);
}

inline cudaError_t launch_states(const ChunkParams& p, bool is_reverse, cudaStream_t stream) {
  const int64_t blocks = p.lines() * (p.value_dim / kStateValues);
  if (p.segments > 1) {
    const cudaError_t error =
        launch_chunked<StatesShared>(mlstm_chunk_states_kernel, blocks * (p.segments - 1), stream, p, is_reverse, true);
    if (error != cudaSuccess) return error;
  }
  return launch_chunked<StatesShared>(mlstm_chunk_states_kernel, blocks * p.segments, stream, p, is_reverse, false);
}

template <Results results>
cudaError_t launch_products(const ChunkParams& p, cudaStream_t stream) {
  const int64_t kinds = results == Results::kGradQK ? 2 : p.value_dim / kMatrixValues, jobs = p.lines() * p.chunks * kinds;
  const int64_t at_once = p.multiprocessors < kinds ? kinds : p.multiprocessors / kinds * kinds;
  return launch_chunked<ProductsShared>(mlstm_chunk_products_kernel<results>, jobs < at_once ? jobs : at_once, stream, p);
}

bool has_mlstm_chunks() { return cuda::is_compiled_for_threads(mlstm_chunk_states_kernel, kChunkThreads); }

cudaError_t launch_mlstm_chunks(const ChunkParams& p, bool is_backward, cudaStream_t stream) {
  const int64_t chunks = p.lines() * p.chunks;
  if (chunks == 0) return cudaSuccess;
  cudaError_t error = launch_warps<kTableWarps>(mlstm_chunk_tables_kernel, chunks, stream, p);
  if (error == cudaSuccess) error = launch_states(p, /*is_reverse=*/false, stream);
  if (!is_backward) return error == cudaSuccess ? launch_products<Results::kOut>(p, stream) : error;
  if (error == cudaSuccess) error = launch_states(p, /*is_reverse=*/true, stream);
  if (error == cudaSuccess) error = launch_products<Results::kGradV>(p, stream);
  if (error == cudaSuccess) error = launch_products<Results::kGradQK>(p, stream);
  if (error == cudaSuccess) error = launch_warps<kTableWarps>(mlstm_gate_gradients_kernel, chunks, stream, p);
  return error;
}

}  // namespace ssm_kernels::mlstm
