// Launches of forward's kernels of the delta rule with a gate per channel of the key.
#pragma once

#include <type_traits>

#include "cuda/chunked/launch_staged.cuh"
#include "delta_rule/cuda/kda_fwd_sm90.cuh"
#include "delta_rule/cuda/kda_launch_chunks.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
cudaError_t launch_kda_chunks(const KdaChunksParams& params, cudaStream_t stream) {
  return launch_kda_chunks_kernel<Scalar, /*is_backward=*/false>(params, stream);
}

template <typename Scalar>
cudaError_t launch_kda_fwd(const KdaFwdParams& params, const Schedule& schedule, bool states_only, bool follows_chunks,
                           cudaStream_t stream) {
  const auto launch_kernel = [&](auto states_only) {
    using Fwd = KdaFwd<Scalar, decltype(states_only)::value>;
    static_assert(Fwd::Shared::bytes() + kTicketBytes <= kSm90SharedBytes, "a block has that much shared memory");
    const auto bytes_of = [](int) { return Fwd::Shared::bytes(); };
    return launch_staged(kda_fwd_sm90_kernel<Scalar, decltype(states_only)::value>, schedule.blocks, Fwd::kThreads, 1, bytes_of,
                         kSm90SharedBytes, stream, Unpacked<KdaFwdParams>{params}, schedule, /*uses_pdl=*/follows_chunks);
  };
  return states_only ? launch_kernel(std::true_type()) : launch_kernel(std::false_type());
}

}  // namespace ssm_kernels::delta_rule
