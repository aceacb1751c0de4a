// Launches of the delta rule's forward kernels.
#pragma once

#include "cuda/chunked/launch_staged.cuh"
#include "delta_rule/cuda/fwd_sm90.cuh"
#include "delta_rule/cuda/launch.h"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
cudaError_t launch_delta_rule_fwd(const DeltaRuleFwdParams& params, const Schedule& schedule, cudaStream_t stream) {
  const auto launch_columns = [&](auto columns) {
    using Fwd = FwdSm90<Scalar, decltype(columns)::value>;
    static_assert(Fwd::Shared::bytes() + kTicketBytes <= kSm90SharedBytes, "a block has that much shared memory");
    const auto bytes_of = [](int) { return Fwd::Shared::bytes(); };
    return launch_staged(delta_rule_fwd_sm90_kernel<Scalar, decltype(columns)::value>, schedule.blocks, Fwd::kThreads, 1,
                         bytes_of, kSm90SharedBytes, stream, Unpacked<DeltaRuleFwdParams>{params}, schedule);
  };
  if (params.dstate <= 64) return launch_columns(std::integral_constant<int, 64>());
  return launch_columns(std::integral_constant<int, kStateColumns>());
}

}  // namespace ssm_kernels::delta_rule
