// Backward of the causal convolution for channels-last tensors: the gradient of x, and those of weight and bias as sums over
// tiles of time.
//
// With pre_t and g_t = grad_out_t act'(pre_t), computed again from x:
//
//   grad_x_t = sum_l w_l g_{t+l}        grad_w_l = sum_t g_t x_{t-l}        grad_bias = sum_t g_t
//
// A lane has kStepVector neighboring channels and goes back in time, with the four inputs that end at its step, the three g
// after it and its sums in registers. A warp begins width - 1 steps after its piece of time, where it computes g only. A block
// adds its warps' sums up in shared memory, in their order, and writes them to the workspace.
//
// kAhead steps at a time shift the inputs. Near the ends of sequences and pieces a step at a time reads them all from memory.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/causal_conv1d_fwd_steps.cuh"

namespace ssm_kernels::causal_conv1d {

template <typename Scalar, bool is_packed>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    conv_bwd_steps_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kStepVector, kAhead = 4, kLags = kMaxVectorWidth, kAfter = kMaxVectorWidth - 1;
  constexpr int kSums = kLags + 1;  // of each channel, by lag and last of bias
  using Inputs = cuda::Vector<Scalar, kVector>;
  const StepPiece piece(p, tiling, kVector);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, width = static_cast<int>(p.width);
  Acc grad_weight[kSums][kVector];
#pragma unroll
  for (int row = 0; row < kSums; ++row) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad_weight[row][i] = 0;
  }

  if (piece.has_channels && piece.t < piece.end) {
    const StepWeights<Scalar, kVector> weights(p, piece.c);
    const bool has_grad_out = p.grad_out.data != nullptr;
    const int64_t last = piece.end + kAfter - 1 < p.seqlen - 1 ? piece.end + kAfter - 1 : p.seqlen - 1;
    const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(piece.b, 0, piece.c);
    const Scalar* const grad_out = static_cast<const Scalar*>(p.grad_out.data) + p.grad_out.offset(piece.b, 0, piece.c);
    Scalar* const grad_x = static_cast<Scalar*>(p.grad_x.data) + p.grad_x.offset(piece.b, 0, piece.c);
    const auto load_grad_out = [&](int64_t t) {
      return has_grad_out ? Inputs::load_once(grad_out + t * p.grad_out.stride_step) : Inputs::zero();
    };

    Acc inputs[kVector], before[kAfter][kVector], grad_after[kAfter][kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int lag = 0; lag < kAfter; ++lag) grad_after[lag][i] = 0;
    }
    // Steps from the present one to its sequence's last; kFar, if it is too far away to matter or has no final state.
    constexpr int kFar = 1 << 30;
    int to_last = last == p.seqlen - 1 ? 0 : kFar;

    // Takes step t, whose inputs are in place. An inner step is one of the piece, without a part in the final state.
    const auto step = [&](int64_t t, const Inputs& grads, auto is_inner) {
      Acc grad_pre[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        grad_pre[i] = grads.accumulate(i);
        if (p.has_silu && has_grad_out) grad_pre[i] *= silu_derivative(weights.sum(width, i, inputs[i], before));
      }
      if (is_inner || t < piece.end) {
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
        if (!is_inner && to_last < width - 1) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            grad_inputs[i] += load_grad_final<Scalar>(p, piece.b, t + to_last, piece.c + i, to_last);
          }
        }
        if (p.grad_x.data != nullptr) Inputs::round(grad_inputs).store_once(grad_x + t * p.grad_x.stride_step);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
#pragma unroll
        for (int lag = kAfter - 1; lag > 0; --lag) grad_after[lag][i] = grad_after[lag - 1][i];
        grad_after[0][i] = grad_pre[i];
      }
      to_last = to_last < kFar ? to_last + 1 : kFar;
    };

    const auto set_inputs = [&](int64_t t) {
      const Inputs loaded = Inputs::load(x + t * p.x.stride_step);
#pragma unroll
      for (int i = 0; i < kVector; ++i) inputs[i] = loaded.accumulate(i);
      load_before<Scalar, kVector, is_packed>(p, piece.b, t, piece.c, before);
    };
    // Whether steps t - kAhead + 1 to t are inner ones whose inputs, and the step's before them, lie in memory one after
    // another.
    const auto are_inner = [&](int64_t t) {
      if (t >= piece.end || to_last < width - 1 || t - kAhead + 1 < max(piece.t, int64_t(kLags))) return false;
      if constexpr (is_packed) {
#pragma unroll
        for (int64_t i = 1 - kAhead - kAfter; i <= 1; ++i) {
          if (t + i < p.seqlen && p.is_first_step(piece.b, t + i)) return false;
        }
      }
      return true;
    };
    set_inputs(last);
    int64_t t = last;
#pragma unroll 1
    while (t >= piece.t) {
      if (are_inner(t)) {
        Inputs grads[kAhead], next[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          grads[j] = load_grad_out(t - j);
          next[j] = Inputs::load_once(x + (t - j - kLags) * p.x.stride_step);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          step(t - j, grads[j], std::true_type());
          // Shifts the inputs to the previous step, which needs x_{t - kLags} and no longer x_t.
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            inputs[i] = before[0][i];
#pragma unroll
            for (int lag = 1; lag < kAfter; ++lag) before[lag - 1][i] = before[lag][i];
            before[kAfter - 1][i] = next[j].accumulate(i);
          }
        }
        t -= kAhead;
      } else {
        if (is_packed && t < last && p.is_last_step(piece.b, t)) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
#pragma unroll
            for (int lag = 0; lag < kAfter; ++lag) grad_after[lag][i] = 0;
          }
          to_last = p.has_state_of_each_sequence ? 0 : kFar;
        }
        step(t, load_grad_out(t), std::false_type());
        if (--t >= piece.t) set_inputs(t);
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
  const int64_t block_channel = piece.c - lane * kVector;
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
