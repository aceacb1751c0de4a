// Launches the delta rule's backward kernels, one after another: matrices and tables, with a block for each chunk of a value
// head; states, with a block for each work tile and direction in time; gradients, with a block for each multiprocessor.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "delta_rule/cuda/bwd_chunks.cuh"
#include "delta_rule/cuda/bwd_matrices.cuh"
#include "delta_rule/cuda/bwd_states.cuh"
#include "delta_rule/cuda/gate_gradients.cuh"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/cuda/row_gradients.cuh"

namespace ssm_kernels::delta_rule {

// The last of the kernels.
template <typename Scalar, int columns>
cudaError_t launch_bwd_chunks(const DeltaRuleBwdParams& params, int multiprocessors, cudaStream_t stream) {
  using Chunks = BwdChunks<Scalar, columns, false>;
  constexpr int kBytes = Chunks::Shared::bytes();
  static_assert(kBytes <= kSm90SharedBytes, "a block has that much shared memory");
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads,
                groups = chunks / params.value_heads_per_key_head, blocks = groups < multiprocessors ? groups : multiprocessors;
  const auto kernel = params.value_heads_per_key_head > 1 ? delta_rule_bwd_chunks_kernel<Scalar, columns, true>
                                                          : delta_rule_bwd_chunks_kernel<Scalar, columns, false>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, blocks, Chunks::kThreads, kBytes, stream, /*uses_pdl=*/true, params);
}

template <typename Scalar>
cudaError_t launch_delta_rule_row_grads(const DeltaRuleRowGradsParams& params, cudaStream_t stream) {
  constexpr int kRows = kRowGradThreads / cuda::kWarpSize;
  const int64_t blocks = (params.batch * params.seqlen * params.heads + kRows - 1) / kRows;
  return cuda::launch(delta_rule_row_grads_kernel<Scalar>, blocks, kRowGradThreads, 0, stream, /*uses_pdl=*/false, params);
}

template <typename Scalar>
cudaError_t launch_delta_rule_gate_grads(const DeltaRuleGateGradsParams& params, cudaStream_t stream) {
  const int64_t blocks =
      (params.steps + kGateGradSteps - 1) / kGateGradSteps * ((params.heads + cuda::kWarpSize - 1) / cuda::kWarpSize);
  return cuda::launch(delta_rule_gate_grads_kernel<Scalar>, blocks, kGateGradThreads, 0, stream, /*uses_pdl=*/false, params);
}

template <typename Scalar>
cudaError_t launch_delta_rule_bwd(const DeltaRuleBwdParams& params, const WorkPartition& partition, bool has_matrices,
                                  int multiprocessors, cudaStream_t stream) {
  const auto launch_columns = [&](auto columns, auto has_updates) {
    constexpr int kColumns = decltype(columns)::value;
    constexpr bool kHasUpdates = decltype(has_updates)::value;
    using Matrices = BwdMatrices<Scalar, kColumns>;
    using States = BwdStates<Scalar, kColumns, kHasUpdates>;
    static_assert(Matrices::kBlocksOfMultiprocessor * (Matrices::Shared::bytes() + 1024) <= kSm90SharedBytes + 1024,
                  "a multiprocessor has that much shared memory, of which each block takes 1 KiB more");
    static_assert(States::Shared::bytes() <= kSm90SharedBytes, "a block has that much shared memory");
    const auto launch = [&](auto kernel, int64_t blocks, int threads, int bytes, bool uses_pdl, const auto&... arguments) {
      if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
      return cuda::launch(kernel, blocks, threads, bytes, stream, uses_pdl, arguments...);
    };
    const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
    if (!has_matrices) {
      const cudaError_t error = launch(delta_rule_bwd_matrices_kernel<Scalar, kColumns>, chunks, Matrices::kThreads,
                                       Matrices::Shared::bytes(), /*uses_pdl=*/false, params);
      if (error != cudaSuccess) return error;
    }
    if (const cudaError_t error =
            launch(delta_rule_bwd_states_kernel<Scalar, kColumns, kHasUpdates>, kDirections * partition.work_tiles,
                   States::kThreads, States::Shared::bytes(), /*uses_pdl=*/true, params, partition);
        error != cudaSuccess || params.states == nullptr) {
      return error;
    }
    return launch_bwd_chunks<Scalar, kColumns>(params, multiprocessors, stream);
  };
  const auto launch_updates = [&](auto columns) {
    return params.log2_updates > 0 ? launch_columns(columns, std::true_type()) : launch_columns(columns, std::false_type());
  };
  if (params.dstate <= 64) return launch_updates(std::integral_constant<int, 64>());
  return launch_updates(std::integral_constant<int, kStateColumns>());
}

}  // namespace ssm_kernels::delta_rule
