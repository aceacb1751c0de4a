// Forward of the causal convolution for channels-last tensors.
//
// A lane has kStepVector neighboring channels and goes through `steps` steps of time, so that a warp reads and writes
// contiguous pieces of rows, each element once; the width - 1 steps before its first are read twice. It keeps the
// channels' weights and the last three inputs in registers. A block's warps take consecutive pieces of time.
//
// kAhead steps at a time are loaded together. Near the ends of packed sequences a step at a time looks whether another sequence
// begins, whose initial state then takes the place of the kept inputs.
#pragma once

#include "causal_conv1d/cuda/causal_conv1d_device.cuh"

namespace ssm_kernels::causal_conv1d {

// A lane's channels and a warp's steps, [t, end), of a block of the kernels of steps.
struct StepPiece {
  int64_t b, t, end, c;
  bool has_channels;

  __device__ __forceinline__ StepPiece(const ConvParams& p, const Tiling& tiling, int vector) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int64_t tile = blockIdx.x / static_cast<unsigned>(tiling.channel_blocks);
    const int64_t channel_block = blockIdx.x - tile * tiling.channel_blocks;
    b = tile / tiling.tiles;
    t = ((tile - b * tiling.tiles) * kWarps + warp) * tiling.steps;
    end = t + tiling.steps < p.seqlen ? t + tiling.steps : p.seqlen;
    c = (channel_block * kWarpSize + lane) * vector;
    has_channels = c < p.channels;
  }
};

// The weights of a lane's channels by lag, those beyond the width zero, and their biases.
template <typename Scalar, int vector>
struct StepWeights {
  using Acc = AccumulateType<Scalar>;
  Acc weight[kMaxVectorWidth][vector], bias[vector];

  __device__ __forceinline__ StepWeights(const ConvParams& p, int64_t c) {
#pragma unroll
    for (int i = 0; i < vector; ++i) {
#pragma unroll
      for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
        weight[lag][i] = lag < p.width ? load_weight<Scalar>(p, c + i, lag) : Acc(0);
      }
      bias[i] = load_bias<Scalar>(p, c + i);
    }
  }

  // bias + sum over the width of weight[lag] inputs[lag]. Inputs beyond the width have no part in it, not even as 0 NaN.
  __device__ __forceinline__ Acc sum(int width, int i, Acc x, const Acc (&before)[kMaxVectorWidth - 1][vector]) const {
    Acc result = bias[i];
    if (width > 3) result = Math<Acc>::fma(weight[3][i], before[2][i], result);
    if (width > 2) result = Math<Acc>::fma(weight[2][i], before[1][i], result);
    if (width > 1) result = Math<Acc>::fma(weight[1][i], before[0][i], result);
    return Math<Acc>::fma(weight[0][i], x, result);
  }
};

// The inputs of `vector` channels 1, 2 and 3 steps before step t of its sequence.
template <typename Scalar, int vector, bool is_packed>
__device__ __forceinline__ void load_before(const ConvParams& p, int64_t b, int64_t t, int64_t c,
                                            AccumulateType<Scalar> (&before)[kMaxVectorWidth - 1][vector]) {
  const int64_t most = kMaxVectorWidth - 1;
  const int64_t since = is_packed ? steps_since_first(p, b, t, most) : (t < most ? t : most);
#pragma unroll
  for (int lag = 1; lag < kMaxVectorWidth; ++lag) {
    if (lag <= since) {
      const auto x = cuda::Vector<Scalar, vector>::load(static_cast<const Scalar*>(p.x.data) + p.x.offset(b, t - lag, c));
#pragma unroll
      for (int i = 0; i < vector; ++i) before[lag - 1][i] = x.accumulate(i);
    } else {
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        before[lag - 1][i] = lag < p.width ? to_accumulate(load_initial<Scalar>(p, b, t - since, c + i, lag - since))
                                           : AccumulateType<Scalar>(0);
      }
    }
  }
}

template <typename Scalar, bool is_packed>
__global__ void __launch_bounds__(kWarpSize* kWarps) conv_fwd_steps_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kStepVector, kAhead = is_packed ? 4 : 8;
  using Inputs = cuda::Vector<Scalar, kVector>;
  const StepPiece piece(p, tiling, kVector);
  if (!piece.has_channels || piece.t >= piece.end) return;
  const StepWeights<Scalar, kVector> weights(p, piece.c);
  const int width = static_cast<int>(p.width);
  Acc before[kMaxVectorWidth - 1][kVector];
  load_before<Scalar, kVector, is_packed>(p, piece.b, piece.t, piece.c, before);

  const Scalar* x = static_cast<const Scalar*>(p.x.data) + p.x.offset(piece.b, piece.t, piece.c);
  Scalar* out = static_cast<Scalar*>(p.out.data) + p.out.offset(piece.b, piece.t, piece.c);
  const auto step = [&](const Inputs& inputs) {
    Acc outputs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const Acc input = inputs.accumulate(i);
      outputs[i] = weights.sum(width, i, input, before);
      before[2][i] = before[1][i];
      before[1][i] = before[0][i];
      before[0][i] = input;
    }
    if (p.has_silu) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) outputs[i] = silu(outputs[i]);
    }
    Inputs::round(outputs).store_once(out);
    out += p.out.stride_step;
  };
  // Whether steps t to t + kAhead - 1 are of one sequence, which goes on after them.
  const auto are_inner = [&](int64_t t) {
    if (t + kAhead > piece.end) return false;
    if constexpr (is_packed) {
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        if (t + i == p.seqlen || (t + i > piece.t && p.is_first_step(piece.b, t + i))) return false;
      }
    }
    return true;
  };
  int64_t t = piece.t;
#pragma unroll 1
  while (t < piece.end) {
    if (are_inner(t)) {
      Inputs inputs[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) inputs[j] = Inputs::load_once(x + j * p.x.stride_step);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) step(inputs[j]);
      x += kAhead * p.x.stride_step;
      t += kAhead;
    } else {
      if (is_packed && t > piece.t && p.is_first_step(piece.b, t)) {
        load_before<Scalar, kVector, is_packed>(p, piece.b, t, piece.c, before);
      }
      step(Inputs::load_once(x));
      if (is_packed && p.final_state.data != nullptr && p.is_last_step(piece.b, t)) {
#pragma unroll 1
        for (int i = 0; i < kVector; ++i) store_final_state<Scalar>(p, p.final_state, piece.b, t, piece.c + i);
      }
      x += p.x.stride_step;
      ++t;
    }
  }
  if constexpr (!is_packed) {
    if (p.final_state.data != nullptr && piece.end == p.seqlen) {
#pragma unroll 1
      for (int i = 0; i < kVector; ++i) store_final_state<Scalar>(p, p.final_state, piece.b, p.seqlen - 1, piece.c + i);
    }
  }
}

}  // namespace ssm_kernels::causal_conv1d
