// Selective state update of complex states on CUDA (common/complex.h), one token or several:
//
//   h = Abar(z) h + delta (k(z) B x + m(z) previous_B previous_x), z = delta A        out = (Re <w C, h> + D x) silu(gate)
//
// A group of 1 to 32 lanes takes a channel through all tokens of the row. A lane has every lanes-th complex state, so that
// neighboring lanes read neighboring pairs of numbers. A second kernel then writes x and B of each token whose state was
// written to the same slot, for rules that read two samples: the channels of a group share previous_B, and all of them have
// read it by then.
#pragma once

#include "common/complex.h"
#include "selective_state_update/cuda/two_sample.cuh"

namespace ssm_kernels::selective_state_update::complex_step {

using cuda::from_accumulate, cuda::to_accumulate;
using two_sample::Call, two_sample::kThreads, two_sample::load_parameter, two_sample::offset_in, two_sample::Row;

constexpr int kPairs = static_cast<int>(kMaxDstate) / 2 / kWarpSize;
static_assert(kPairs * 2 * kWarpSize == kMaxDstate, "32 lanes hold all states of a channel");

template <typename Input>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_complex_kernel(const __grid_constant__ StateUpdateParams p,
                                          const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                          const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  using Number = Complex<Acc>;
  const int lanes = 1 << call.log2_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t group_of_lanes = call.first + ((int64_t(blockIdx.x) * kThreads + threadIdx.x) >> call.log2_lanes);
  const bool exists = group_of_lanes < call.count;  // the others take part in the exchanges of their warp
  const int64_t place = exists ? group_of_lanes : call.count - 1, channels = p.channels();
  const int64_t b = place / channels, channel = place - b * channels;
  const int64_t head = channel / p.headdim, dim = channel - head * p.headdim, group = channel / (channels / p.groups);
  const int states = static_cast<int>(p.dstate) / 2;
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
  const auto number_at = [](const void* data, int64_t offset, int64_t stride) {
    const Acc* const source = static_cast<const Acc*>(data) + offset;
    return Number(source[0], source[stride]);
  };
  // Visits the lane's states, the k-th of which is state n.
  const auto for_each = [&](const auto& visit) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (k * lanes + lane < states) visit(k, 2 * (k * lanes + lane));
    }
  };
  const auto row_of_slot = [&](int64_t slot) {
    return slot * p.state.stride_batch + head * p.state.stride_head + dim * p.state.stride_dim;
  };
  const bool reads_two = two.previous_x.data != nullptr;
  Number h[kPairs], A[kPairs], B_before[kPairs];
  const int64_t A_row = head * p.A.stride_head + dim * p.A.stride_dim;
  for_each([&](int k, int n) {
    h[k] = number_at(p.state.data, row_of_slot(row.slot) + n * p.state.stride_state, p.state.stride_state);
    A[k] = number_at(p.A.data, A_row + n * p.A.stride_state, p.A.stride_state);
    B_before[k] = Number(Acc(0));
    if (!reads_two) return;
    const GroupView& view = two.previous_B;
    B_before[k] = number_at(view.data, row.slot * view.stride_batch + group * view.stride_group + n * view.stride_state,
                            view.stride_state);
  });
  Acc x_before = 0;
  if (reads_two) {
    x_before = to_accumulate(static_cast<const Input*>(two.previous_x.data)[offset_in(two.previous_x, row.slot, head, dim)]);
  }
  const Acc bias = p.dt_bias.data == nullptr
                       ? Acc(0)
                       : load_parameter<Input>(p.dt_bias.data, offset_in(p.dt_bias, 0, head, dim), p.dt_bias_is_input_kind);
  const Acc skip =
      p.D.data == nullptr ? Acc(0) : load_parameter<Input>(p.D.data, offset_in(p.D, 0, head, dim), p.D_is_input_kind);
  const Acc weight = two.conjugate_pairs ? Acc(2) : Acc(1);
#pragma unroll 1
  for (int64_t t = 0; t < row.range.count; ++t) {
    const int64_t token = row.range.first + t;
    const auto of_channel = [&](const ChannelView& view, int64_t stride) {
      return to_accumulate(static_cast<const Input*>(view.data)[offset_in(view, b, head, dim) + token * token_stride(stride)]);
    };
    const auto of_group = [&](const GroupView& view, int64_t stride, int n) {
      const int64_t first = b * view.stride_batch + group * view.stride_group + token * token_stride(stride);
      return number_at(view.data, first + n * view.stride_state, view.stride_state);
    };
    const Acc x = of_channel(p.x, tokens.x);
    Acc delta = of_channel(p.dt, tokens.dt), lam = 0, sum = 0;
    if (p.dt_bias.data != nullptr) delta += bias;
    if (p.dt_softplus) delta = softplus(delta);
    delta = clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
    if (two.lam.data != nullptr) {
      lam = of_channel(two.lam, two.lam_token);
      if (two.lam_sigmoid) lam = sigmoid(lam);
    }
    visit_complex_rule(p.discretization, [&](auto rule) {
      const auto method = rule.step(Number(lam, Acc(0)));
      using Method = std::decay_t<decltype(method)>;
      for_each([&](int k, int n) {
        const Number z = scaled(delta, A[k]), basis = complex_basis(method, delta, z, ComplexRate<Acc>(A[k].re, A[k].im));
        const Number B = of_group(p.B, tokens.B, n), C = of_group(p.C, tokens.C, n);
        const auto gain = method.gain(z, basis);
        Number inputs = gain.current * scaled(delta * x, B);
        if constexpr (Method::kUsesPreviousInput) {
          inputs = multiply_add(gain.previous, scaled(delta * x_before, B_before[k]), inputs);
        }
        h[k] = multiply_add(method.abar(z, basis), h[k], inputs);
        sum = dot_add(h[k], Number(C.re, -C.im), sum);
        B_before[k] = B;
      });
    });
    x_before = x;
    for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(group_mask, sum, distance);
    if (exists && lane == 0) {
      sum *= weight;
      if (p.D.data != nullptr) sum = Math<Acc>::fma(skip, x, sum);
      if (p.z.data != nullptr) sum *= silu(of_channel(p.z, tokens.z));
      out[t * token_stride(tokens.out)] = from_accumulate<Input>(sum);
    }
    const int64_t write = row.write_slot(p, t);
    if (!exists || write < 0) continue;
    for_each([&](int k, int n) {
      Acc* const target = static_cast<Acc*>(p.state.data) + row_of_slot(write) + n * p.state.stride_state;
      target[0] = h[k].re;
      target[p.state.stride_state] = h[k].im;
    });
  }
}

// A thread copies one element, of x or of B.
template <typename Input>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_complex_samples_kernel(const __grid_constant__ StateUpdateParams p,
                                                  const __grid_constant__ TwoSampleParams two,
                                                  const __grid_constant__ Call call,
                                                  const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  const int64_t channels = p.channels(), elements = channels + p.groups * p.dstate;
  const int64_t place = call.first + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= call.count) return;
  const int64_t b = place / elements, element = place - b * elements;
  const Row row(p, call, tokens, b);
  if (!row.is_in_state) return;
  for (int64_t t = 0; t < row.range.count; ++t) {
    const int64_t write = row.write_slot(p, t), token = row.range.first + t;
    if (write < 0) continue;
    if (element < channels) {
      const int64_t head = element / p.headdim, dim = element - head * p.headdim;
      static_cast<Input*>(two.previous_x.data)[offset_in(two.previous_x, write, head, dim)] =
          static_cast<const Input*>(p.x.data)[offset_in(p.x, b, head, dim) + (call.has_tokens ? token * tokens.x : 0)];
    } else {
      const int64_t group = (element - channels) / p.dstate, n = element - channels - group * p.dstate;
      const auto at = [&](const GroupView& view, int64_t of_row) {
        return of_row * view.stride_batch + group * view.stride_group + n * view.stride_state;
      };
      static_cast<Acc*>(two.previous_B.data)[at(two.previous_B, write)] =
          static_cast<const Acc*>(p.B.data)[at(p.B, b) + (call.has_tokens ? token * tokens.B : 0)];
    }
  }
}

}  // namespace ssm_kernels::selective_state_update::complex_step

namespace ssm_kernels::selective_state_update {

template <typename Input>
cudaError_t launch_complex_update(const StateUpdateParams& params, const TwoSampleParams& two, const TokenParams* tokens,
                                  cudaStream_t stream) {
  namespace kernels = complex_step;
  kernels::Call call;
  call.has_tokens = tokens != nullptr;
  while ((1 << call.log2_lanes) < params.dstate / 2 && (1 << call.log2_lanes) < kWarpSize) ++call.log2_lanes;
  const TokenParams all = tokens != nullptr ? *tokens : TokenParams();
  const cudaError_t error =
      two_sample::launch_all(kernels::selective_state_update_complex_kernel<Input>, false, params, two, call, all,
                             params.batch * params.channels(), kernels::kThreads >> call.log2_lanes, stream);
  if (error != cudaSuccess || two.previous_x.data == nullptr) return error;
  const int64_t elements = params.channels() + params.groups * params.dstate;
  return two_sample::launch_all(kernels::selective_state_update_complex_samples_kernel<Input>, false, params, two, call, all,
                                params.batch * elements, kernels::kThreads, stream);
}

}  // namespace ssm_kernels::selective_state_update
