// Selective state update on CUDA with a step of its own for A (common/separate_step.h), of methods that read one sample:
//
//   h = e^{delta_A A} h + delta k(delta A) B x        out = (<C, h> + D x) silu(gate)
//
// A group of lanes takes a channel through all tokens of a row (channel.cuh). The methods that read two samples are in
// two_sample.cuh.
#pragma once

#include "common/separate_step.h"
#include "selective_state_update/cuda/channel.cuh"

namespace ssm_kernels::selective_state_update::two_sample {

template <typename Input, typename State>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_separate_kernel(const __grid_constant__ StateUpdateParams p,
                                           const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                           const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  using Channel = Channel<Input, State>;
  constexpr bool kUnrolls = true;
  Channel channel(p, call, tokens);
  if (!channel.row.is_in_state) return channel.write_without_slot();
  typename Channel::States h[kVectors];
  Acc A[kVectors][kVector];
  channel.template for_each<kUnrolls>([&](int v, int n) {
    channel.load_state(h[v], n);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (n + i < channel.dstate) A[v][i] = channel.load_A(n + i);
    }
  });
  channel.load_parameters();
#pragma unroll 1
  for (int64_t t = 0; t < channel.row.range.count; ++t) {
    const Acc x = channel.of_channel(p.x, tokens.x, t), delta = channel.step_size(t);
    // An infinite step and a rate of zero keep the state.
    const Acc delta_A = Math<Acc>::min(channel.of_channel(two.dt_A, two.dt_A_token, t), kLargestRate<Acc>);
    Acc sum = 0;
    visit_separate_step(p.discretization, [&](auto rule) {
      if constexpr (!decltype(rule)::kUsesPreviousInput) {
        const Acc input = decltype(rule)::kInputHasDelta ? delta * x : x;
        channel.template for_each<kUnrolls>([&](int v, int n) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            // A step size of inf makes even a zero state NaN.
            if (n + i >= channel.dstate) continue;
            const Acc B = channel.of_group(p.B, tokens.B, t, n + i), basis = rule.basis(delta_A * A[v][i]);
            const Acc gain = rule.gain(delta * A[v][i], basis).current;
            const Acc value = Math<Acc>::fma(basis, to_accumulate(h[v][i]), input * gain * B);
            sum = Math<Acc>::fma(value, channel.of_group(p.C, tokens.C, t, n + i), sum);
            h[v].set(i, from_accumulate<State>(value));
          }
        });
      }
    });
    channel.write_out(t, x, sum);
    channel.template write_states<kUnrolls>(t, h);
  }
}

}  // namespace ssm_kernels::selective_state_update::two_sample

namespace ssm_kernels::selective_state_update {

template <typename Input, typename State>
cudaError_t launch_separate_update(const StateUpdateParams& params, const TwoSampleParams& two, const TokenParams* tokens,
                                   cudaStream_t stream) {
  namespace kernels = two_sample;
  const kernels::Call call = kernels::make_call<State>(params, tokens);
  return kernels::launch_all(kernels::selective_state_update_separate_kernel<Input, State>, /*is_dependent=*/false, params, two,
                             call, tokens != nullptr ? *tokens : TokenParams(), params.batch * params.channels(),
                             kernels::kThreads >> call.log2_lanes, stream);
}

}  // namespace ssm_kernels::selective_state_update
