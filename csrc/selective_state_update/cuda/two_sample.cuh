// Selective state update on CUDA for the methods of common/two_sample_discretization.h, which read the sample before, too:
//
//   h = Abar(z) h + delta (k(z) B x + m(z) previous_B previous_x), z = delta A        out = (<C, h> + D x) silu(gate)
//
// The kernel of rows takes one token where all that it loads of a channel are vectors of kVector neighboring states and offsets
// fit 32 bits. A group of lanes takes kRowsInFlight neighboring channels of a row of the batch and loads all of them before it
// uses the first; each of its first lanes owns a channel, as in update.cuh.
//
// The general kernel takes the others: a group of lanes takes a channel through all tokens of a row (channel.cuh), with vectors
// of states, of A and of B of the token before in local memory. It also takes exp_trapezoidal with a step of its own for A
// (common/separate_step.h), e^{delta_A A} in place of e^z.
//
// A last kernel writes x and B of each token whose state was written to the same slot: the channels of a group share
// previous_B, and all of them have read it by then. The kernel of rows has written x, which no other channel reads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/activations.h"
#include "common/separate_step.h"
#include "common/two_sample_discretization.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/vector_io.cuh"
#include "selective_state_update/cuda/channel.cuh"
#include "selective_state_update/cuda/launch.h"
#include "selective_state_update/cuda/rows.cuh"

namespace ssm_kernels::selective_state_update::two_sample {

// How the kernel of rows divides a call: groups of lanes, of kRowsInFlight channels each.
struct RowsCall {
  int log2_lanes = 0;
  uint32_t count = 0;  // groups of lanes
  cuda::Divisor per_batch, headdim, channels_per_group;
};

template <typename Input, typename State>
__global__ void __launch_bounds__(kThreads, 7)
    selective_state_update_two_sample_rows_kernel(const __grid_constant__ StateUpdateParams p,
                                                  const __grid_constant__ TwoSampleParams two,
                                                  const __grid_constant__ RowsCall call) {
  using Acc = cuda::AccumulateType<Input>;
  using Inputs = Vector<Input, kVector>;
  using States = Vector<State, kVector>;
  constexpr int kRows = kRowsInFlight;
  cuda::launch_dependents();
  const int lanes = 1 << call.log2_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  // Blocks and threads shifted apart: the number of a thread may need more than 32 bits.
  const uint32_t group_of_lanes = blockIdx.x * (kThreads >> call.log2_lanes) + (threadIdx.x >> call.log2_lanes);
  const uint32_t place = min(group_of_lanes, call.count - 1), b = call.per_batch.divide(place);
  const uint32_t channel = (place - b * call.per_batch.template value<uint32_t>()) * kRows;
  const uint32_t head = call.headdim.divide(channel), dim = channel - head * call.headdim.template value<uint32_t>();
  const uint32_t group = call.channels_per_group.divide(channel);
  const int64_t slot = p.indices.at(b);
  const bool exists = group_of_lanes < call.count, is_slot = slot >= 0 && slot < p.slots;
  const bool is_owner = exists && lane < kRows;
  const int n = lane * kVector;
  const bool loads = is_slot && n < static_cast<int>(p.dstate);
  const int64_t row = is_slot ? slot : 0;

  const auto own = [&](const ChannelView& view, int64_t of_row) {
    return of_row * view.stride_batch + head * view.stride_head + (dim + lane) * view.stride_dim;
  };
  const auto load_own = [&](const ChannelView& view, int64_t of_row) {
    return static_cast<const Input*>(view.data)[own(view, of_row)];
  };
  const auto in_group = [&](const GroupView& view, int64_t of_row) {
    const Input* const source =
        static_cast<const Input*>(view.data) + of_row * view.stride_batch + group * view.stride_group + n;
    return loads ? Inputs::load(source) : Inputs::zero();
  };
  State* const state = static_cast<State*>(p.state.data) + row * p.state.stride_batch + head * p.state.stride_head + n;
  States h[kRows];
  Vector<Acc, kVector> A[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) h[r] = loads ? States::load_once(state + (dim + r) * p.state.stride_dim) : States::zero();
  Input x_in, dt_in, z_in, lam_in, before_in{};
  Acc bias = 0, skip = 0;
  if (is_owner) {
    x_in = load_own(p.x, b);
    dt_in = load_own(p.dt, b);
    if (is_slot) before_in = load_own(two.previous_x, row);
    if (p.z.data != nullptr) z_in = load_own(p.z, b);
    if (two.lam.data != nullptr) lam_in = load_own(two.lam, b);
    if (p.dt_bias.data != nullptr) bias = load_parameter<Input>(p.dt_bias.data, own(p.dt_bias, 0), p.dt_bias_is_input_kind);
    if (p.D.data != nullptr) skip = load_parameter<Input>(p.D.data, own(p.D, 0), p.D_is_input_kind);
  }
  const Inputs B = in_group(p.B, b), C = in_group(p.C, b), B_before = in_group(two.previous_B, row);
  const int64_t A_row = head * p.A.stride_head + dim * p.A.stride_dim + n;
  const auto load_A = [&](const auto* data) {
    using Loaded = Vector<std::remove_cv_t<std::remove_pointer_t<decltype(data)>>, kVector>;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Loaded loaded = loads ? Loaded::load(data + A_row + r * p.A.stride_dim) : Loaded::zero();
#pragma unroll
      for (int i = 0; i < kVector; ++i) A[r].set(i, loaded.accumulate(i));
    }
  };
  if (!std::is_same_v<Input, Acc> && p.A_is_input_kind) {
    load_A(static_cast<const Input*>(p.A.data));
  } else {
    load_A(static_cast<const Acc*>(p.A.data));
  }
  if (p.A_is_log) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) A[r].set(i, -Math<Acc>::exp(A[r][i]));
    }
  }

  Acc delta = 0, lam = 0, current = 0, previous = 0;
  if (is_owner) {
    delta = to_accumulate(dt_in) + bias;
    if (p.dt_softplus) delta = softplus(delta);
    delta = clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
    if (two.lam.data != nullptr) {
      lam = to_accumulate(lam_in);
      if (two.lam_sigmoid) lam = sigmoid(lam);
    }
    current = delta * to_accumulate(x_in);
    previous = delta * to_accumulate(before_in);
  }
  Acc partial[kRows];
  visit_two_sample_discretization(p.discretization, two.method, [&](auto rule) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto of_row = [&](Acc owned) { return shuffle(owned, r, lanes); };
      const Acc row_delta = of_row(delta), row_current = of_row(current), row_previous = of_row(previous);
      const auto method = rule.step(decltype(rule)::kHasLam ? of_row(lam) : Acc(0));
      Acc sum = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Acc z = row_delta * A[r][i], basis = method.basis(z);
        const Coefficients<Acc> gain = method.gain(z, basis);
        const Acc inputs =
            Math<Acc>::fma(row_previous * gain.previous, B_before.accumulate(i), row_current * gain.current * B.accumulate(i));
        const Acc value = Math<Acc>::fma(method.abar(z, basis), h[r].accumulate(i), inputs);
        sum = Math<Acc>::fma(value, C.accumulate(i), sum);
        h[r].set(i, from_accumulate<State>(value));
      }
      partial[r] = loads ? sum : Acc(0);  // a step size of inf makes even a zero state NaN
      if (exists && loads) h[r].store_once(state + (dim + r) * p.state.stride_dim);
    }
  });
  Acc sum = reduce_rows(partial, lane, lanes);
  if (!is_owner) return;
  if (p.D.data != nullptr) sum = Math<Acc>::fma(skip, to_accumulate(x_in), sum);
  if (p.z.data != nullptr) sum *= silu(to_accumulate(z_in));
  if (!is_slot) sum = slot < 0 ? Acc(0) : static_cast<Acc>(nan(""));
  static_cast<Input*>(p.out.data)[own(p.out, b)] = from_accumulate<Input>(sum);
  if (is_slot) static_cast<Input*>(two.previous_x.data)[own(two.previous_x, row)] = x_in;
}

template <typename Input, typename State>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_two_sample_kernel(const __grid_constant__ StateUpdateParams p,
                                             const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                             const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  using Channel = Channel<Input, State>;
  constexpr bool kUnrolls = false;
  Channel channel(p, call, tokens);
  if (!channel.row.is_in_state) return channel.write_without_slot();
  typename Channel::States h[kVectors];
  Acc A[kVectors][kVector], b_before[kVectors][kVector];
  const int64_t slot = channel.row.slot;
  const Input* const B_before = static_cast<const Input*>(two.previous_B.data) + slot * two.previous_B.stride_batch +
                                channel.group * two.previous_B.stride_group;
  channel.template for_each<kUnrolls>([&](int v, int n) { channel.load_state(h[v], n); });
  channel.template for_each<kUnrolls>([&](int v, int n) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (n + i >= channel.dstate) continue;
      A[v][i] = channel.load_A(n + i);
      b_before[v][i] = to_accumulate(B_before[(n + i) * two.previous_B.stride_state]);
    }
  });
  Acc x_before =
      to_accumulate(static_cast<const Input*>(two.previous_x.data)[offset_in(two.previous_x, slot, channel.head, channel.dim)]);
  channel.load_parameters();
#pragma unroll 1
  for (int64_t t = 0; t < channel.row.range.count; ++t) {
    const Acc x = channel.of_channel(p.x, tokens.x, t), delta = channel.step_size(t);
    Acc lam = 0, delta_A = 0, sum = 0;
    if (two.lam.data != nullptr) {
      lam = channel.of_channel(two.lam, two.lam_token, t);
      if (two.lam_sigmoid) lam = sigmoid(lam);
    }
    // An infinite step and a rate of zero keep the state.
    if (two.dt_A.data != nullptr) {
      delta_A = Math<Acc>::min(channel.of_channel(two.dt_A, two.dt_A_token, t), kLargestRate<Acc>);
    }
    const Acc current = delta * x, previous = delta * x_before;
    const auto step = [&](auto rule) {
      const auto method = rule.step(lam);
      channel.template for_each<kUnrolls>([&](int v, int n) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          // A step size of inf makes even a zero state NaN.
          if (n + i >= channel.dstate) continue;
          const Acc own = channel.of_group(p.B, tokens.B, t, n + i), z = delta * A[v][i];
          const Acc basis = method.basis(kHasSeparateStep<decltype(rule)> ? delta_A * A[v][i] : z);
          const Coefficients<Acc> gain = method.gain(z, basis);
          const Acc inputs = Math<Acc>::fma(previous * gain.previous, b_before[v][i], current * gain.current * own);
          const Acc value = Math<Acc>::fma(method.abar(z, basis), to_accumulate(h[v][i]), inputs);
          sum = Math<Acc>::fma(value, channel.of_group(p.C, tokens.C, t, n + i), sum);
          h[v].set(i, from_accumulate<State>(value));
          b_before[v][i] = own;
        }
      });
    };
    // One rule with two samples has a step of its own for A.
    if (two.dt_A.data != nullptr) {
      step(SeparateStep<ExpTrapezoidalRule>{});
    } else {
      visit_two_sample_discretization(p.discretization, two.method, step);
    }
    x_before = x;
    channel.write_out(t, x, sum);
    channel.template write_states<kUnrolls>(t, h);
  }
}

// Copies x and B of tokens to the slots that received the states after them. A thread has one element of a row.
template <typename Input>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_samples_kernel(const __grid_constant__ StateUpdateParams p,
                                          const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                          const __grid_constant__ TokenParams tokens) {
  cuda::grid_dependency_sync();
  const int64_t channels = call.has_written_x ? 0 : p.channels(), elements = channels + p.groups * p.dstate;
  const int64_t place = call.first + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= call.count) return;
  const int64_t b = place / elements, element = place - b * elements;
  const Row row(p, call, tokens, b);
  if (!row.is_in_state) return;
  const bool is_x = element < channels;
  const int64_t head = element / p.headdim, dim = element - head * p.headdim;
  const int64_t group = (element - channels) / p.dstate, n = element - channels - group * p.dstate;
  const auto in_group = [&](const GroupView& view, int64_t row_of) {
    return row_of * view.stride_batch + group * view.stride_group + n * view.stride_state;
  };
  const Input* const source = is_x ? static_cast<const Input*>(p.x.data) + offset_in(p.x, b, head, dim)
                                   : static_cast<const Input*>(p.B.data) + in_group(p.B, b);
  const int64_t stride = !call.has_tokens ? 0 : is_x ? tokens.x : tokens.B;
  for (int64_t t = 0; t < row.range.count; ++t) {
    const int64_t write = row.write_slot(p, t);
    if (write < 0) continue;
    Input* const target = is_x ? static_cast<Input*>(two.previous_x.data) + offset_in(two.previous_x, write, head, dim)
                               : static_cast<Input*>(two.previous_B.data) + in_group(two.previous_B, write);
    *target = source[(row.range.first + t) * stride];
  }
}

}  // namespace ssm_kernels::selective_state_update::two_sample

namespace ssm_kernels::selective_state_update {

template <typename Input, typename State>
cudaError_t launch_two_sample_update(const StateUpdateParams& params, const TwoSampleParams& two, const TokenParams* tokens,
                                     cudaStream_t stream) {
  namespace kernels = two_sample;
  constexpr int64_t kVector = kernels::kVector;
  const int64_t channels = params.channels(), groups = params.batch * channels;
  kernels::Call call = kernels::make_call<State>(params, tokens);
  const auto has_group_vectors = [&](const GroupView& view) {
    constexpr int64_t kBytes = sizeof(Input), kAlignment = std::min<int64_t>(kVector * kBytes, 16);
    return view.stride_state == 1 && reinterpret_cast<int64_t>(view.data) % kAlignment == 0 &&
           view.stride_batch * kBytes % kAlignment == 0 && view.stride_group * kBytes % kAlignment == 0;
  };
  const TokenParams all = tokens != nullptr ? *tokens : TokenParams();
  const auto launch_samples = [&] {
    const auto kernel = kernels::selective_state_update_samples_kernel<Input>;
    const int64_t of_row = (call.has_written_x ? 0 : channels) + params.groups * params.dstate;
    return kernels::launch_all(kernel, call.has_written_x && cuda::has_pdl(kernel), params, two, call, all,
                               params.batch * of_row, kernels::kThreads, stream);
  };
  if constexpr (!std::is_same_v<Input, double>) {
    constexpr int64_t kRows = kRowsInFlight, kLimit = int64_t(1) << 30;
    const int64_t bytes_of_A = params.A_is_input_kind ? sizeof(Input) : sizeof(cuda::AccumulateType<Input>);
    if (tokens == nullptr && two.dt_A.data == nullptr && call.has_vectors &&
        kernels::has_vectors(params, params.A, bytes_of_A) && has_group_vectors(params.B) && has_group_vectors(params.C) &&
        has_group_vectors(two.previous_B) && params.dstate <= kWarpSize * kVector && groups > 0 &&
        params.headdim % kRows == 0 && channels / params.groups % kRows == 0 && groups < kLimit) {
      kernels::RowsCall rows;
      rows.log2_lanes = std::max(call.log2_lanes, 2);
      rows.count = static_cast<uint32_t>(groups / kRows);
      rows.per_batch = cuda::Divisor(channels / kRows);
      rows.headdim = cuda::Divisor(params.headdim);
      rows.channels_per_group = cuda::Divisor(channels / params.groups);
      const int64_t per_block = kernels::kThreads >> rows.log2_lanes;
      call.has_written_x = true;
      const cudaError_t error =
          cuda::launch(kernels::selective_state_update_two_sample_rows_kernel<Input, State>,
                       (rows.count + per_block - 1) / per_block, kernels::kThreads, 0, stream, false, params, two, rows);
      return error == cudaSuccess ? launch_samples() : error;
    }
  }
  const cudaError_t error = kernels::launch_all(kernels::selective_state_update_two_sample_kernel<Input, State>, false, params,
                                                two, call, all, groups, kernels::kThreads >> call.log2_lanes, stream);
  return error == cudaSuccess ? launch_samples() : error;
}

}  // namespace ssm_kernels::selective_state_update
