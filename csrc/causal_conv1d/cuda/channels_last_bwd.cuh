// Backward of the causal convolution for channels-last tensors (batch, seqlen, channels): grad_x, and partial sums of
// grad_weight and grad_bias over tiles of time.
//
// With g_t = grad_out_t act'(pre_t), where pre_t is recomputed from x:
//
//   grad_x_t = sum_l w_l g_{t+l}        grad_w_l = sum_t g_t x_{t-l}        grad_bias = sum_t g_t
//
// Blocks, warps and lanes have the segments and channels of forward (channels_last_fwd.cuh). A lane goes back in time, with the
// input at its step, the kHalo inputs before it, the kHalo g after it and its sums in registers. A warp begins kHalo steps
// after its segment, where it computes g only. A block adds its warps' sums in shared memory, in the order of the warps, and
// writes a row of partial sums to the workspace.
//
// The main loop computes kAhead steps per iteration, while cp.async copies the next iteration's inputs and gradients into
// stages of shared memory that belong to the lane. Near the ends of sequences a second loop computes one step at a time and
// reads all of its inputs from global memory; in padding it only stores zeros to grad_x. The specialized kernel also takes a
// second gradient of out, which it adds to the first.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/channels_last_fwd.cuh"
#include "cuda/ptx/pdl.cuh"

namespace ssm_kernels::causal_conv1d {

// kAfter: a step after the segment, g only. kInner: a step outside the final state. kEdge: any step of the segment.
enum class StepKind { kAfter, kInner, kEdge };

template <typename Scalar, bool is_specialized, bool has_second, bool is_shifted>
__global__ void __launch_bounds__(kWarpSize* kWarps, is_specialized ? kBwdBlocks : kBwdBlocks - 1)
    conv_bwd_channels_last_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  cuda::launch_dependents();
  constexpr int kVector = kLaneChannels, kAhead = has_second && sizeof(Scalar) > 2 ? 2 : 4, kLags = kMaxVectorWidth;
  constexpr int kSums = kLags + 1;  // per channel: grad_weight by lag, then grad_bias
  using Inputs = ChannelsLastRows<const Scalar, is_shifted>;
  const ChannelsLastSegment<Scalar, is_shifted> segment(p, tiling);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int width = is_specialized ? kMaxVectorWidth : static_cast<int>(p.width);
  // Two pipeline stages of kAhead steps: x, grad_out and the second grad_out.
  __shared__ typename Inputs::Stage stages[2][kAhead][has_second ? 3 : 2];
  Acc grad_weight[kSums][kVector] = {};

  if (segment.has_channels && segment.t < segment.end) {
    const Inputs x(p.x, p, segment), grad_out(p.grad_out, p, segment), grad_out_2(p.grad_out_2, p, segment);
    const ChannelsLastRows<Scalar, is_shifted> grad_x(p.grad_x, p, segment);
    const Taps<Scalar, kVector, segment.kDistance> taps(p, width, segment.c);
    const int seqlen = static_cast<int>(p.seqlen);

    Acc inputs[kVector], before[kHalo][kVector], grad_after[kHalo][kVector] = {};
    // Steps from the present one to the last of its sequence; kFar if the final state has no part in the gradients.
    constexpr int kFar = 1 << 30;
    const bool has_grad_final = p.grad_final_state.data != nullptr;
    int to_last = kFar;

    // Takes the step's grad_out in `g` and makes it g.
    const auto step = [&](int t, Acc(&g)[kVector], auto kind, auto has_silu) {
      constexpr StepKind kKind = decltype(kind)::value;
      if (has_silu) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const auto x_at = [&](int lag) { return lag == 0 ? inputs[i] : before[lag - 1][i]; };
          g[i] *= silu_derivative(taps.convolve(width, i, x_at));
        }
      }
      if constexpr (kKind != StepKind::kAfter) {
        Acc grad_inputs[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          grad_inputs[i] = taps.correlate(width, i, [&](int lag) { return lag == 0 ? g[i] : grad_after[lag - 1][i]; });
          grad_weight[0][i] = Math<Acc>::fma(g[i], inputs[i], grad_weight[0][i]);
#pragma unroll
          for (int lag = 1; lag < kLags; ++lag) {
            grad_weight[lag][i] = Math<Acc>::fma(g[i], before[lag - 1][i], grad_weight[lag][i]);
          }
          grad_weight[kLags][i] += g[i];
        }
        if (kKind == StepKind::kEdge && to_last < width - 1) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            if (segment.has_channel(p, i)) {
              grad_inputs[i] += load_grad_final<Scalar>(p, segment.b, t + to_last, segment.channel(i), to_last);
            }
          }
        }
        if (is_specialized || p.grad_x.data != nullptr) grad_x.store(t, grad_inputs);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
#pragma unroll
        for (int lag = kHalo - 1; lag > 0; --lag) grad_after[lag][i] = grad_after[lag - 1][i];
        grad_after[0][i] = g[i];
      }
    };
    // Moves the window of inputs one step back, all but its oldest input.
    const auto shift_inputs = [&] {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        inputs[i] = before[0][i];
#pragma unroll
        for (int lag = 1; lag < kHalo; ++lag) before[lag - 1][i] = before[lag][i];
      }
    };
    // Computes any step, which may be the last of a sequence.
    const auto step_alone = [&](int t, auto kind) {
      if (t == seqlen - 1 || (!is_specialized && p.is_last_step(segment.b, t))) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
#pragma unroll
          for (int lag = 0; lag < kHalo; ++lag) grad_after[lag][i] = 0;
        }
        to_last = has_grad_final && (t == seqlen - 1 || p.has_state_of_each_sequence) ? 0 : kFar;
      }
      to_channels(x.load(t), inputs);
      load_before<Scalar, is_specialized, is_shifted>(p, segment, x, t, before);
      Acc g[kVector];
      to_channels(grad_out.load_once(t), g);
      if constexpr (has_second) add_channels(grad_out_2.load_once(t), g);
      step(t, g, kind, p.has_silu);
      to_last = to_last < kFar ? to_last + 1 : kFar;
    };
    // Whether no sequence begins in steps [from, to]; `to` may be seqlen.
    const auto is_unbroken = [&](int from, int to) {
      if constexpr (!is_specialized) {
#pragma unroll
        for (int t = from; t <= to; ++t) {
          if (t < seqlen && p.is_first_step(segment.b, t)) return false;
        }
      }
      return true;
    };
    // The main loop takes zeros for inputs before a batch row of one sequence without an initial state.
    const bool takes_zeros = is_specialized && kAhead >= kHalo && p.initial_state.data == nullptr;
    // Whether the main loop takes steps t - kAhead + 1 to t: inner steps of one sequence that began at least kHalo steps
    // earlier.
    const auto are_inner = [&](int t) {
      const int least = t - kAhead + 1;
      return least >= segment.t && (least >= kHalo || takes_zeros) && to_last >= width - 1 &&
             (t + 1 < seqlen || !has_grad_final) && is_unbroken(least - kHalo + 1, t + 1);
    };

    const auto is_padding = [&](int t) { return !is_specialized && p.is_padding(segment.b, t); };

    if (segment.end + kHalo <= seqlen && is_unbroken(segment.end - kHalo + 1, segment.end + kHalo - 1) &&
        !is_padding(segment.end)) {
      typename Inputs::Row rows[2 * kHalo], grads[kHalo];
#pragma unroll
      for (int j = 0; j < 2 * kHalo; ++j) rows[j] = x.load(segment.end + kHalo - 1 - j);
#pragma unroll
      for (int j = 0; j < kHalo; ++j) grads[j] = grad_out.load_once(segment.end + kHalo - 1 - j);
      to_channels(rows[0], inputs);
#pragma unroll
      for (int lag = 0; lag < kHalo; ++lag) to_channels(rows[1 + lag], before[lag]);
#pragma unroll
      for (int j = 0; j < kHalo; ++j) {
        Acc g[kVector];
        to_channels(grads[j], g);
        if constexpr (has_second) add_channels(grad_out_2.load_once(segment.end + kHalo - 1 - j), g);
        step(segment.end + kHalo - 1 - j, g, std::integral_constant<StepKind, StepKind::kAfter>(), p.has_silu);
        if (j + 1 < kHalo) {
          shift_inputs();
          to_channels(rows[1 + kHalo + j], before[kHalo - 1]);
        }
      }
    } else {
      const int last = segment.end + kHalo - 1 < seqlen - 1 ? segment.end + kHalo - 1 : seqlen - 1;
#pragma unroll 1
      for (int t = last; t >= segment.end; --t) {
        if (!is_padding(t)) step_alone(t, std::integral_constant<StepKind, StepKind::kAfter>());
      }
    }

    int t = segment.end - 1;
    bool is_inner = !is_padding(t) && are_inner(t);
#pragma unroll 1
    while (t >= segment.t) {
      if (is_inner) {
        to_channels(x.load_once(t), inputs);
#pragma unroll
        for (int lag = 1; lag < kHalo; ++lag) to_channels(x.load_once(t - lag), before[lag - 1]);
        int stage = 0;
        const auto start_copies = [&](int t) {
          if (!takes_zeros || t >= kHalo + kAhead - 1) {
#pragma unroll
            for (int j = 0; j < kAhead; ++j) x.start_copy(t - kHalo - j, stages[stage][j][0]);
          } else {
#pragma unroll 1
            for (int j = 0; j < kAhead; ++j) {
              t >= kHalo + j ? x.start_copy(t - kHalo - j, stages[stage][j][0]) : x.stage_zero(stages[stage][j][0]);
            }
          }
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            grad_out.start_copy(t - j, stages[stage][j][1]);
            if constexpr (has_second) grad_out_2.start_copy(t - j, stages[stage][j][2]);
          }
        };
        Inputs::sync();
        start_copies(t);
        cuda::cp_async_commit();
        const auto run = [&](auto has_silu) {
#pragma unroll 1
          do {
            is_inner = are_inner(t - kAhead);
            stage ^= 1;
            Inputs::sync();
            if (is_inner) start_copies(t - kAhead);
            cuda::cp_async_commit();
            cuda::cp_async_wait<1>();
            Inputs::sync();
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              Acc g[kVector];
              to_channels(x.staged(t - kHalo - j, stages[stage ^ 1][j][0]), before[kHalo - 1]);
              to_channels(grad_out.staged(t - j, stages[stage ^ 1][j][1]), g);
              if constexpr (has_second) add_channels(grad_out_2.staged(t - j, stages[stage ^ 1][j][2]), g);
              step(t - j, g, std::integral_constant<StepKind, StepKind::kInner>(), has_silu);
              shift_inputs();
            }
            t -= kAhead;
          } while (is_inner);
        };
        p.has_silu ? run(std::true_type()) : run(std::false_type());
        to_last = kFar;
      } else if (is_padding(t)) {
        if (p.grad_x.data != nullptr) grad_x.store_zero(t);
        --t;
      } else {
        step_alone(t, std::integral_constant<StepKind, StepKind::kEdge>());
        --t;
        is_inner = are_inner(t);
      }
    }
  }

  if (sums == nullptr) return;
  __shared__ Acc shared[kWarps][kSums * kVector][kWarpSize];
#pragma unroll
  for (int row = 0; row < kSums; ++row) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) shared[warp][row * kVector + i][lane] = grad_weight[row][i];
  }
  __syncthreads();
  constexpr int kChannels = segment.kChannels;
  const int64_t block_channel = segment.c - lane * (is_shifted ? 1 : kVector);
  Acc* const target = sums + blockIdx.x / static_cast<unsigned>(tiling.channel_blocks) * (p.width + 1) * p.channels;
  for (int index = threadIdx.x; index < kSums * kChannels; index += kWarpSize * kWarps) {
    const int row = index / kChannels, channel = index % kChannels;
    if (block_channel + channel >= p.channels || (row >= width && row < kLags)) continue;
    const int i = is_shifted ? channel / kWarpSize : channel % kVector;
    const int owner = is_shifted ? channel % kWarpSize : channel / kVector;
    Acc sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][row * kVector + i][owner];
    target[(row < kLags ? row : width) * p.channels + block_channel + channel] = sum;
  }
}

}  // namespace ssm_kernels::causal_conv1d
