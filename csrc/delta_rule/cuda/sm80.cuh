// Launches of the delta rule's kernels with mma.sync (sm80_chunk.cuh).
#pragma once

#include "cuda/chunked/launch_staged.cuh"
#include "delta_rule/cuda/sm80_gradients.cuh"
#include "delta_rule/cuda/sm80_matrices.cuh"
#include "delta_rule/cuda/sm80_states.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
cudaError_t launch_delta_rule_sm80_matrices(const DeltaRuleSm80Params& params, cudaStream_t stream) {
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  return cuda::launch(delta_rule_sm80_matrices_kernel<Scalar>, chunks, Sm80Matrices<Scalar>::kThreads, 0, stream,
                      /*uses_pdl=*/false, params);
}

// A block has two warpgroups if V has rows for them, shared memory allows it, and blocks of one would not all run at the same
// time.
template <typename Scalar, int columns, Sm80Pass pass>
cudaError_t launch_sm80_states(const DeltaRuleSm80Params& params, const WorkPartition& partition, int available,
                               cudaStream_t stream) {
  using Stage = Sm80Stage<Scalar, columns>;
  const bool has_pairs = partition.row_blocks > 1;
  const bool are_pairs =
      has_pairs && kWarpgroups * partition.work_tiles > params.multiprocessors && Stage::bytes(kWarpgroups) <= available;
  const int warpgroups = are_pairs ? kWarpgroups : 1, blocks_of_tile = has_pairs ? kWarpgroups / warpgroups : 1;
  return launch_staged(
      delta_rule_sm80_states_kernel<Scalar, columns, pass>, partition.work_tiles * blocks_of_tile,
      warpgroups * kWarpgroupThreads, Sm80States<Scalar, columns, pass>::kMaxStages,
      [&](int stages) { return stages * Stage::bytes(warpgroups); }, available, stream, params, partition);
}

// Calls launch(columns) with the columns of a state tile.
template <typename Scalar, typename Launch>
cudaError_t visit_sm80_columns(int dstate, const Launch& launch) {
  if (dstate <= 64) return launch(std::integral_constant<int, 64>());
  if (is_wide(dstate)) return launch(std::integral_constant<int, kMaxKernelDstate>());
  return launch(std::integral_constant<int, kStateColumns>());
}

template <typename Scalar>
cudaError_t launch_delta_rule_sm80_fwd(const DeltaRuleSm80Params& params, const WorkPartition& partition, int available,
                                       cudaStream_t stream) {
  return visit_sm80_columns<Scalar>(params.dstate, [&](auto columns) {
    return launch_sm80_states<Scalar, decltype(columns)::value, Sm80Pass::kOut>(params, partition, available, stream);
  });
}

template <typename Scalar, int columns>
cudaError_t launch_sm80_gradients(const DeltaRuleSm80Params& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Sm80GradientsShared<Scalar, columns>);
  static_assert(kBytes <= sm80_gradients_bytes(columns, sizeof(Scalar)), "the host asks the device for that much");
  const auto kernel = delta_rule_sm80_gradients_kernel<Scalar, columns>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  return cuda::launch(kernel, chunks * ((params.dstate + columns - 1) / columns), Sm80Gradients<Scalar, columns>::kThreads,
                      kBytes, stream, /*uses_pdl=*/false, params);
}

template <typename Scalar>
cudaError_t launch_delta_rule_sm80_bwd(const DeltaRuleSm80Params& params, const WorkPartition& partition, int available,
                                       cudaStream_t stream) {
  const cudaError_t error = visit_sm80_columns<Scalar>(params.dstate, [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    const cudaError_t of_states = launch_sm80_states<Scalar, kColumns, Sm80Pass::kStates>(params, partition, available, stream);
    if (of_states != cudaSuccess || partition.directions == Directions::kForward) return of_states;
    return launch_sm80_states<Scalar, kColumns, Sm80Pass::kGradients>(params, partition, available, stream);
  });
  if (error != cudaSuccess || params.states == nullptr) return error;
  if constexpr (sm80_gradient_columns(kStateColumns, sizeof(Scalar)) == kStateColumns) {
    if (params.dstate > 64) return launch_sm80_gradients<Scalar, kStateColumns>(params, stream);
  }
  return launch_sm80_gradients<Scalar, 64>(params, stream);
}

}  // namespace ssm_kernels::delta_rule
