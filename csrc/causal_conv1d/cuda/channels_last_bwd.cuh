// Backward of the causal convolution for channels-last tensors: the gradient of x, and those of weight and bias as sums over
// tiles of time.
//
// With pre_t and g_t = grad_out_t act'(pre_t), computed again from x:
//
//   grad_x_t = sum_l w_l g_{t+l}        grad_w_l = sum_t g_t x_{t-l}        grad_bias = sum_t g_t
//
// A lane has kLaneChannels neighboring channels and goes back in time, with the four inputs that end at its step, the three g
// after it and its sums in registers. A warp begins width - 1 steps after its interval of time, where it computes g only. A
// block adds its warps' sums in shared memory, in their order, and writes them to the workspace.
//
// grad_out may be the sum of two tensors, which only the plain kernel takes. The main loop takes kAhead steps per iteration.
// Each lane copies the next iteration's inputs and gradients into shared memory of its own meanwhile, which takes no registers
// and no barrier. Near the ends of sequences one step at a time reads all of its inputs from memory.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/channels_last_fwd.cuh"

namespace ssm_kernels::causal_conv1d {

// kHalo: steps after the interval, g only. kInner: steps that the final state does not contain. kEdge: any step.
enum class StepKind { kHalo, kInner, kEdge };

template <typename Scalar, bool is_plain, bool has_second>
__global__ void __launch_bounds__(kWarpSize* kWarps, is_plain ? kBwdBlocks : kBwdBlocks - 1)
    conv_bwd_channels_last_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kLaneChannels, kAhead = has_second && sizeof(Scalar) > 2 ? 2 : 4, kLags = kMaxVectorWidth;
  constexpr int kSums = kLags + 1;  // of each channel, by lag and last of bias
  using Inputs = cuda::Vector<Scalar, kVector>;
  const ChannelsLastSegment segment(p, tiling, kVector);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int width = is_plain ? kMaxVectorWidth : static_cast<int>(p.width);
  // Inputs and gradients of two groups of steps, each lane's by itself.
  __shared__ Inputs ring[2][kAhead][has_second ? 3 : 2][kWarpSize * kWarps];
  Acc grad_weight[kSums][kVector];
#pragma unroll
  for (int row = 0; row < kSums; ++row) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad_weight[row][i] = 0;
  }

  if (segment.has_channels && segment.t < segment.end) {
    const ChannelsLastRows<const Scalar> x(p.x, segment.b, segment.c), grad_out(p.grad_out, segment.b, segment.c);
    const ChannelsLastRows<const Scalar> grad_out_2(p.grad_out_2, segment.b, segment.c);
    const ChannelsLastRows<Scalar> grad_x(p.grad_x, segment.b, segment.c);
    const StepWeights<Scalar, kVector> weights(p, width, segment.c);
    const int seqlen = static_cast<int>(p.seqlen);

    Acc inputs[kVector], before[kBefore][kVector], grad_after[kBefore][kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int lag = 0; lag < kBefore; ++lag) grad_after[lag][i] = 0;
    }
    // Steps from the present one to its sequence's last; kFar if that is too far away to matter or has no final state.
    constexpr int kFar = 1 << 30;
    const bool has_grad_final = p.grad_final_state.data != nullptr;
    int to_last = kFar;

    // Begins with the step's grad_out in grad_pre.
    const auto step = [&](int t, Acc(&grad_pre)[kVector], auto kind, auto has_silu) {
      constexpr StepKind kKind = decltype(kind)::value;
      if (has_silu) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) grad_pre[i] *= silu_derivative(weights.sum(width, i, inputs[i], before));
      }
      if constexpr (kKind != StepKind::kHalo) {
        Acc grad_inputs[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          grad_inputs[i] = weights.weight[0][i] * grad_pre[i];
          // Weights beyond the width are zero, but what they would be multiplied with may be infinite.
          if (width > 1) grad_inputs[i] = Math<Acc>::fma(weights.weight[1][i], grad_after[0][i], grad_inputs[i]);
          if (width > 2) grad_inputs[i] = Math<Acc>::fma(weights.weight[2][i], grad_after[1][i], grad_inputs[i]);
          if (width > 3) grad_inputs[i] = Math<Acc>::fma(weights.weight[3][i], grad_after[2][i], grad_inputs[i]);
          grad_weight[0][i] = Math<Acc>::fma(grad_pre[i], inputs[i], grad_weight[0][i]);
#pragma unroll
          for (int lag = 1; lag < kLags; ++lag) {
            grad_weight[lag][i] = Math<Acc>::fma(grad_pre[i], before[lag - 1][i], grad_weight[lag][i]);
          }
          grad_weight[kLags][i] += grad_pre[i];
        }
        if (kKind == StepKind::kEdge && to_last < width - 1) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            grad_inputs[i] += load_grad_final<Scalar>(p, segment.b, t + to_last, segment.c + i, to_last);
          }
        }
        if (is_plain || p.grad_x.data != nullptr) grad_x.store(t, Inputs::round(grad_inputs));
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
#pragma unroll
        for (int lag = kBefore - 1; lag > 0; --lag) grad_after[lag][i] = grad_after[lag - 1][i];
        grad_after[0][i] = grad_pre[i];
      }
    };
    // Moves the window of inputs one step back, to the step whose oldest input `oldest` is.
    const auto shift_inputs = [&](const Inputs& oldest) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        inputs[i] = before[0][i];
#pragma unroll
        for (int lag = 1; lag < kBefore; ++lag) before[lag - 1][i] = before[lag][i];
        before[kBefore - 1][i] = oldest.accumulate(i);
      }
    };
    // A step of any kind, with its own check of what ends at it.
    const auto step_alone = [&](int t, auto kind) {
      if (t == seqlen - 1 || (!is_plain && p.is_last_step(segment.b, t))) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
#pragma unroll
          for (int lag = 0; lag < kBefore; ++lag) grad_after[lag][i] = 0;
        }
        to_last = has_grad_final && (t == seqlen - 1 || p.has_state_of_each_sequence) ? 0 : kFar;
      }
      to_channels(x.load(t), inputs);
      load_before<Scalar, kVector, is_plain>(p, segment.b, t, segment.c, before);
      Acc grad_pre[kVector];
      to_channels(grad_out.load_once(t), grad_pre);
      if constexpr (has_second) add_channels(grad_out_2.load_once(t), grad_pre);
      step(t, grad_pre, kind, p.has_silu);
      to_last = to_last < kFar ? to_last + 1 : kFar;
    };
    // Whether no sequence begins in [from, to]; `to` may be seqlen.
    const auto is_unbroken = [&](int from, int to) {
      if constexpr (!is_plain) {
#pragma unroll
        for (int t = from; t <= to; ++t) {
          if (t < seqlen && p.is_first_step(segment.b, t)) return false;
        }
      }
      return true;
    };
    // Whether steps t - kAhead + 1 to t are inner ones whose inputs, and the step's before them, are consecutive in memory.
    const auto are_inner = [&](int t) {
      const int least = t - kAhead + 1;
      return least >= segment.t && least >= kBefore && to_last >= width - 1 && (t + 1 < seqlen || !has_grad_final) &&
             is_unbroken(least - kBefore + 1, t + 1);
    };

    if (segment.end + kBefore <= seqlen && is_unbroken(segment.end - kBefore + 1, segment.end + kBefore - 1)) {
      Inputs rows[2 * kBefore], grads[kBefore];
#pragma unroll
      for (int j = 0; j < 2 * kBefore; ++j) rows[j] = x.load(segment.end + kBefore - 1 - j);
#pragma unroll
      for (int j = 0; j < kBefore; ++j) grads[j] = grad_out.load_once(segment.end + kBefore - 1 - j);
      to_channels(rows[0], inputs);
#pragma unroll
      for (int lag = 0; lag < kBefore; ++lag) to_channels(rows[1 + lag], before[lag]);
#pragma unroll
      for (int j = 0; j < kBefore; ++j) {
        Acc grad_pre[kVector];
        to_channels(grads[j], grad_pre);
        if constexpr (has_second) add_channels(grad_out_2.load_once(segment.end + kBefore - 1 - j), grad_pre);
        step(segment.end + kBefore - 1 - j, grad_pre, std::integral_constant<StepKind, StepKind::kHalo>(), p.has_silu);
        if (j + 1 < kBefore) shift_inputs(rows[1 + kBefore + j]);
      }
    } else {
      const int last = segment.end + kBefore - 1 < seqlen - 1 ? segment.end + kBefore - 1 : seqlen - 1;
#pragma unroll 1
      for (int t = last; t >= segment.end; --t) step_alone(t, std::integral_constant<StepKind, StepKind::kHalo>());
    }

    int t = segment.end - 1;
    bool is_inner = are_inner(t);
#pragma unroll 1
    while (t >= segment.t) {
      if (is_inner) {
        to_channels(x.load_once(t), inputs);
#pragma unroll
        for (int lag = 1; lag < kBefore; ++lag) to_channels(x.load_once(t - lag), before[lag - 1]);
        int half = 0;
        const auto start_copies = [&](int t) {
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            x.start_copy(t - kBefore - j, ring[half][j][0][threadIdx.x]);
            grad_out.start_copy(t - j, ring[half][j][1][threadIdx.x]);
            if constexpr (has_second) grad_out_2.start_copy(t - j, ring[half][j][2][threadIdx.x]);
          }
        };
        start_copies(t);
        cuda::cp_async_commit();
        const auto run = [&](auto has_silu) {
#pragma unroll 1
          do {
            is_inner = are_inner(t - kAhead);
            half ^= 1;
            if (is_inner) start_copies(t - kAhead);
            cuda::cp_async_commit();
            cuda::cp_async_wait<1>();
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              Acc grad_pre[kVector];
              to_channels(ring[half ^ 1][j][0][threadIdx.x], before[kBefore - 1]);
              to_channels(ring[half ^ 1][j][1][threadIdx.x], grad_pre);
              if constexpr (has_second) add_channels(ring[half ^ 1][j][2][threadIdx.x], grad_pre);
              step(t - j, grad_pre, std::integral_constant<StepKind, StepKind::kInner>(), has_silu);
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                inputs[i] = before[0][i];
#pragma unroll
                for (int lag = 1; lag < kBefore; ++lag) before[lag - 1][i] = before[lag][i];
              }
            }
            t -= kAhead;
          } while (is_inner);
        };
        p.has_silu ? run(std::true_type()) : run(std::false_type());
        to_last = kFar;
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
  constexpr int kChannels = kWarpSize * kVector;
  const int64_t block_channel = segment.c - lane * kVector;
  Acc* const target = sums + blockIdx.x / static_cast<unsigned>(tiling.channel_blocks) * (p.width + 1) * p.channels;
  for (int index = threadIdx.x; index < kSums * kChannels; index += kWarpSize * kWarps) {
    const int row = index / kChannels, channel = index % kChannels;
    if (block_channel + channel >= p.channels || (row >= width && row < kLags)) continue;
    Acc sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][row * kVector + channel % kVector][channel / kVector];
    target[(row < kLags ? row : width) * p.channels + block_channel + channel] = sum;
  }
}

}  // namespace ssm_kernels::causal_conv1d
