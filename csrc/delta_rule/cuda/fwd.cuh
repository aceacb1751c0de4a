// Launches of the delta rule's forward kernels: what is computed of each step alone (step_factors.cuh), the chunk matrices
// (chunk_matrices_sm90.cuh), and the scan (fwd_sm90.cuh).
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/chunked/launch_staged.cuh"
#include "delta_rule/cuda/chunk_matrices_sm90.cuh"
#include "delta_rule/cuda/fwd_sm90.cuh"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/cuda/step_factors.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
cudaError_t launch_delta_rule_factors(const DeltaRuleFactorsParams& params, cudaStream_t stream) {
  const int64_t blocks =
      params.batch * ((params.seqlen + kFactorSteps - 1) / kFactorSteps) * (params.heads / params.value_heads_per_key_head);
  return cuda::launch(delta_rule_factors_kernel<Scalar>, blocks, kFactorThreads, 0, stream, /*uses_pdl=*/false, params);
}

template <typename Scalar>
cudaError_t launch_delta_rule_chunk_matrices(const DeltaRuleMatricesParams& params, cudaStream_t stream) {
  const int64_t numbers = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr),
                items = numbers * (params.heads / params.value_heads_per_key_head);
  const auto launch_columns = [&](auto columns) {
    using Matrices = ChunkMatrices<Scalar, decltype(columns)::value>;
    constexpr int kBytes = Matrices::Shared::bytes();
    static_assert(Matrices::kBlocksOfMultiprocessor * (kBytes + 1024) <= kSm90SharedBytes + 1024,
                  "a multiprocessor has that much shared memory, of which each block takes 1 KiB more");
    const auto kernel = delta_rule_chunk_matrices_kernel<Scalar, decltype(columns)::value>;
    if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
    const int64_t blocks = std::min<int64_t>(items, int64_t(Matrices::kBlocksOfMultiprocessor) * params.multiprocessors);
    return cuda::launch(kernel, blocks, Matrices::kThreads, kBytes, stream, /*uses_pdl=*/false, params);
  };
  if (params.dstate <= 64) return launch_columns(std::integral_constant<int, 64>());
  return launch_columns(std::integral_constant<int, kStateColumns>());
}

template <typename Scalar>
cudaError_t launch_delta_rule_fwd(const DeltaRuleFwdParams& params, const Schedule& schedule, bool states_only,
                                  bool follows_matrices, cudaStream_t stream) {
  const auto launch_kernel = [&](auto columns, auto states_only, auto has_updates) {
    constexpr int kColumns = decltype(columns)::value;
    constexpr bool kStatesOnly = decltype(states_only)::value, kHasUpdates = decltype(has_updates)::value;
    using Fwd = FwdSm90<Scalar, kColumns, kStatesOnly, kHasUpdates>;
    static_assert(Fwd::Shared::bytes() + kTicketBytes <= kSm90SharedBytes, "a block has that much shared memory");
    const auto bytes_of = [](int) { return Fwd::Shared::bytes(); };
    return launch_staged(delta_rule_fwd_sm90_kernel<Scalar, kColumns, kStatesOnly, kHasUpdates>, schedule.blocks, Fwd::kThreads,
                         1, bytes_of, kSm90SharedBytes, stream, Unpacked<DeltaRuleFwdParams>{params}, schedule,
                         /*uses_pdl=*/follows_matrices);
  };
  const auto launch_columns = [&](auto columns) {
    if (states_only) return launch_kernel(columns, std::true_type(), std::false_type());
    if (params.log2_updates > 0) return launch_kernel(columns, std::false_type(), std::true_type());
    return launch_kernel(columns, std::false_type(), std::false_type());
  };
  if (params.dstate <= 64) return launch_columns(std::integral_constant<int, 64>());
  return launch_columns(std::integral_constant<int, kStateColumns>());
}

}  // namespace ssm_kernels::delta_rule
