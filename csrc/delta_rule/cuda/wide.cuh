// Launches the delta rule's kernels for keys of 129 to 256 columns (wide_state.cuh).
#pragma once

#include "cuda/launch.cuh"
#include "delta_rule/cuda/bwd_chunks.cuh"
#include "delta_rule/cuda/bwd_matrices.cuh"
#include "delta_rule/cuda/bwd_wide_states.cuh"
#include "delta_rule/cuda/fwd_wide_sm90.cuh"
#include "delta_rule/cuda/launch.h"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
cudaError_t launch_delta_rule_wide_matrices(const DeltaRuleBwdParams& params, cudaStream_t stream) {
  using Matrices = BwdMatrices<Scalar, kWideColumns>;
  static_assert(Matrices::kBlocksOfMultiprocessor * (Matrices::Shared::bytes() + 1024) <= kSm90SharedBytes + 1024,
                "a multiprocessor has that much shared memory, of which each block takes 1 KiB more");
  const auto kernel = delta_rule_bwd_matrices_kernel<Scalar, kWideColumns>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, Matrices::Shared::bytes()); error != cudaSuccess) return error;
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  return cuda::launch(kernel, chunks, Matrices::kThreads, Matrices::Shared::bytes(), stream, /*uses_pdl=*/false, params);
}

template <typename Scalar>
cudaError_t launch_delta_rule_fwd_wide(const DeltaRuleFwdParams& params, const Schedule& schedule, cudaStream_t stream) {
  using Fwd = FwdWide<Scalar>;
  constexpr int kBytes = Fwd::Shared::bytes();
  static_assert(kBytes + kTicketBytes <= kSm90SharedBytes, "a block has that much shared memory");
  const auto kernel = delta_rule_fwd_wide_kernel<Scalar>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, schedule.blocks, Fwd::kThreads, kBytes, stream, /*uses_pdl=*/false,
                      Unpacked<DeltaRuleFwdParams>{params}, schedule);
}

// Backward: the states, in both directions in time or forward alone.
template <typename Scalar>
cudaError_t launch_delta_rule_bwd_wide_states(const DeltaRuleBwdParams& params, const WorkPartition& partition,
                                              cudaStream_t stream) {
  using States = BwdWideStates<Scalar>;
  constexpr int kBytes = States::Shared::bytes();
  static_assert(kBytes <= kSm90SharedBytes, "a block has that much shared memory");
  const auto kernel = delta_rule_bwd_wide_states_kernel<Scalar>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  const int64_t blocks = (partition.directions == Directions::kForward ? 1 : kDirections) * partition.work_tiles;
  return cuda::launch(kernel, blocks, States::kThreads, kBytes, stream, /*uses_pdl=*/false, params, partition);
}

// Backward: the gradients.
template <typename Scalar>
cudaError_t launch_delta_rule_bwd_wide_chunks(const DeltaRuleBwdParts& parts, int multiprocessors, cudaStream_t stream) {
  using Chunks = BwdChunks<Scalar, kStateColumns, false, kColumnParts>;
  constexpr int kBytes = Chunks::Shared::bytes();
  static_assert(kBytes <= kSm90SharedBytes, "a block has that much shared memory");
  const DeltaRuleBwdParams& params = parts.of[0];
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads,
                groups = chunks / params.value_heads_per_key_head,
                pairs = groups < multiprocessors / kColumnParts ? groups : multiprocessors / kColumnParts;
  const auto kernel = params.value_heads_per_key_head > 1 ? delta_rule_bwd_wide_chunks_kernel<Scalar, true>
                                                          : delta_rule_bwd_wide_chunks_kernel<Scalar, false>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, kColumnParts * pairs, Chunks::kThreads, kBytes, stream, /*uses_pdl=*/false, parts);
}

}  // namespace ssm_kernels::delta_rule
