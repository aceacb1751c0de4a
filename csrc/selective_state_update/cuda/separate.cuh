// Selective state update on CUDA with a step of its own for A (common/separate_step.h), of methods that read one sample:
//
//   h = e^{delta_A A} h + delta k(delta A) B x        out = (<C, h> + D x) silu(gate)
//
// A group of 1 to 32 lanes takes a channel of a row of the batch, through all tokens of the row, as in two_sample.cuh.
#pragma once

#include <algorithm>
#include <iterator>

#include "common/separate_step.h"
#include "selective_state_update/cuda/two_sample.cuh"

namespace ssm_kernels::selective_state_update::two_sample {

template <typename Input, typename State>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_separate_kernel(const __grid_constant__ StateUpdateParams p,
                                           const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                           const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  using States = Vector<State, kVector>;
  const int lanes = 1 << call.log2_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t group_of_lanes = call.first + ((int64_t(blockIdx.x) * kThreads + threadIdx.x) >> call.log2_lanes);
  const bool exists = group_of_lanes < call.count;  // the others take part in the exchanges of their warp
  const int64_t place = exists ? group_of_lanes : call.count - 1, channels = p.channels();
  const int64_t b = place / channels, channel = place - b * channels;
  const int64_t head = channel / p.headdim, dim = channel - head * p.headdim, group = channel / (channels / p.groups);
  const int dstate = static_cast<int>(p.dstate);
  // Groups of other rows may have other numbers of tokens.
  const unsigned int group_mask = (kAllLanes >> (kWarpSize - lanes)) << (threadIdx.x % kWarpSize - lane);
  const Row row(p, call, tokens, b);
  const auto token_stride = [&](int64_t stride) { return call.has_tokens ? stride : int64_t(0); };
  Input* const out =
      static_cast<Input*>(p.out.data) + offset_in(p.out, b, head, dim) + row.range.first * token_stride(tokens.out);
  if (!row.is_in_state) {
    if (!exists || lane != 0) return;
    const Input value = from_accumulate<Input>(row.slot < 0 ? Acc(0) : static_cast<Acc>(nan("")));
    for (int64_t t = 0; t < row.range.count; ++t) out[t * token_stride(tokens.out)] = value;
    return;
  }

  // State i of a lane's vector v is (v * lanes + lane) * kVector + i.
  const auto for_each = [&](const auto& visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (const int first = (v * lanes + lane) * kVector; first < dstate) visit(v, first);
    }
  };
  const auto row_of_slot = [&](int64_t slot) {
    return static_cast<State*>(p.state.data) + slot * p.state.stride_batch + head * p.state.stride_head +
           dim * p.state.stride_dim;
  };
  States h[kVectors];
  Acc A[kVectors][kVector];
  const State* const state = row_of_slot(row.slot);
  const int64_t A_row = head * p.A.stride_head + dim * p.A.stride_dim;
  for_each([&](int v, int n) {
    if (call.has_vectors) h[v] = States::load_once(state + n);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (n + i >= dstate) continue;
      if (!call.has_vectors) h[v].set(i, state[(n + i) * p.state.stride_state]);
      A[v][i] = load_parameter<Input>(p.A.data, A_row + (n + i) * p.A.stride_state, p.A_is_input_kind);
      if (p.A_is_log) A[v][i] = -Math<Acc>::exp(A[v][i]);
    }
  });
  const Acc bias = p.dt_bias.data == nullptr
                       ? Acc(0)
                       : load_parameter<Input>(p.dt_bias.data, offset_in(p.dt_bias, 0, head, dim), p.dt_bias_is_input_kind);
  const Acc skip =
      p.D.data == nullptr ? Acc(0) : load_parameter<Input>(p.D.data, offset_in(p.D, 0, head, dim), p.D_is_input_kind);
#pragma unroll 1
  for (int64_t t = 0; t < row.range.count; ++t) {
    const int64_t token = row.range.first + t;
    const auto of_channel = [&](const ChannelView& view, int64_t stride) {
      return to_accumulate(static_cast<const Input*>(view.data)[offset_in(view, b, head, dim) + token * token_stride(stride)]);
    };
    const auto of_group = [&](const GroupView& view, int64_t stride, int n) {
      return to_accumulate(static_cast<const Input*>(
          view.data)[b * view.stride_batch + group * view.stride_group + token * token_stride(stride) + n * view.stride_state]);
    };
    const Acc x = of_channel(p.x, tokens.x);
    Acc delta = of_channel(p.dt, tokens.dt), sum = 0;
    if (p.dt_bias.data != nullptr) delta += bias;
    if (p.dt_softplus) delta = softplus(delta);
    delta = clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
    // An infinite step and a rate of zero keep the state.
    const Acc delta_A = Math<Acc>::min(of_channel(two.dt_A, two.dt_A_token), kLargestRate<Acc>);
    visit_separate_step(p.discretization, [&](auto rule) {
      if constexpr (!decltype(rule)::kUsesPreviousInput) {
        const Acc input = decltype(rule)::kInputHasDelta ? delta * x : x;
        for_each([&](int v, int n) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            // A step size of inf makes even a zero state NaN.
            if (n + i >= dstate) continue;
            const Acc basis = rule.basis(delta_A * A[v][i]), gain = rule.gain(delta * A[v][i], basis).current;
            const Acc value = Math<Acc>::fma(basis, to_accumulate(h[v][i]), input * gain * of_group(p.B, tokens.B, n + i));
            sum = Math<Acc>::fma(value, of_group(p.C, tokens.C, n + i), sum);
            h[v].set(i, from_accumulate<State>(value));
          }
        });
      }
    });
    for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(group_mask, sum, distance);
    if (exists && lane == 0) {
      if (p.D.data != nullptr) sum = Math<Acc>::fma(skip, x, sum);
      if (p.z.data != nullptr) sum *= silu(of_channel(p.z, tokens.z));
      out[t * token_stride(tokens.out)] = from_accumulate<Input>(sum);
    }
    const int64_t write = row.write_slot(p, t);
    if (!exists || write < 0) continue;
    State* const target = row_of_slot(write);
    for_each([&](int v, int n) {
      if (call.has_vectors) {
        h[v].store_once(target + n);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (n + i < dstate) target[(n + i) * p.state.stride_state] = h[v][i];
        }
      }
    });
  }
}

// The number of lanes of a group, and whether they move vectors of the state.
template <typename State>
Call make_separate_call(const StateUpdateParams& p, const TokenParams* tokens) {
  Call call;
  call.has_tokens = tokens != nullptr;
  while ((kVector << call.log2_lanes) < p.dstate && (1 << call.log2_lanes) < kWarpSize) ++call.log2_lanes;
  constexpr int64_t kBytes = sizeof(State), kAlignment = std::min<int64_t>(kVector * kBytes, 16);
  const StateView& view = p.state;
  const int64_t offsets[] = {reinterpret_cast<int64_t>(view.data), view.stride_batch * kBytes, view.stride_head * kBytes,
                             view.stride_dim * kBytes};
  call.has_vectors = (view.stride_state == 1 || p.dstate == 1) && p.dstate % kVector == 0 &&
                     std::all_of(std::begin(offsets), std::end(offsets), [](int64_t at) { return at % kAlignment == 0; });
  return call;
}

}  // namespace ssm_kernels::selective_state_update::two_sample

namespace ssm_kernels::selective_state_update {

template <typename Input, typename State>
cudaError_t launch_separate_update(const StateUpdateParams& params, const TwoSampleParams& two, const TokenParams* tokens,
                                   cudaStream_t stream) {
  namespace kernels = two_sample;
  const kernels::Call call = kernels::make_separate_call<State>(params, tokens);
  return kernels::launch_all(kernels::selective_state_update_separate_kernel<Input, State>, /*is_dependent=*/false, params, two,
                             call, tokens != nullptr ? *tokens : TokenParams(), params.batch * params.channels(),
                             kernels::kThreads >> call.log2_lanes, stream);
}

}  // namespace ssm_kernels::selective_state_update
