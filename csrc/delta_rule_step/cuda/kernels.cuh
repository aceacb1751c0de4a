// The launcher of both kernels of the delta rule's step.
#pragma once

#include "delta_rule_step/cuda/staged.cuh"
#include "delta_rule_step/cuda/step.cuh"

namespace ssm_kernels::delta_rule_step {

template <typename Input, typename State>
cudaError_t launch_delta_rule_step(const StepParams& params, const TokenParams* tokens, const Tiling& tiling,
                                   cudaStream_t stream) {
  const int64_t bytes = shared_bytes_of_warp(tiling, sizeof(State), sizeof(cuda::AccumulateType<Input>));
  const int block_bytes = static_cast<int>(tiling.warps_per_block * bytes);
  auto* kernel = delta_rule_step_staged_kernel<Input, State>;
  if constexpr (!std::is_same_v<State, double>) {
    if (tokens == nullptr) {
      return launch_grids(delta_rule_step_kernel<Input, State>, params, tiling, block_bytes, stream);
    }
    if (!tiling.staged) {
      kernel = tiling.vectors == 1 ? delta_rule_step_tokens_kernel<Input, State, 1>
                                   : delta_rule_step_tokens_kernel<Input, State, most_vectors(sizeof(State))>;
    }
  }
  return launch_grids(kernel, params, tiling, block_bytes, stream, *tokens);
}

}  // namespace ssm_kernels::delta_rule_step
