// The causal convolution for channels-first tensors, whose steps are contiguous: forward, and backward as in
// causal_conv1d_bwd_steps.cuh. Each row of the batch is one sequence.
//
// A warp has a tile of time of one channel. A lane loads 16 bytes of neighboring steps; the three steps before its first come
// from the lane below, and in backward the three g after its last from the lane above. Forward goes on in time and keeps what
// the last lane had for the next lane 0; backward goes back and keeps what lane 0 had. A warp's sums for the gradients of
// weight and bias are added up over its lanes by shuffles, in a fixed order.
#pragma once

#include "causal_conv1d/cuda/causal_conv1d_device.cuh"

namespace ssm_kernels::causal_conv1d {

constexpr int kBefore = kMaxVectorWidth - 1;

// A warp's tile, [begin, end) of channel c.
struct RowPiece {
  int64_t b, c, tile, begin, end;

  __device__ __forceinline__ bool find(const ConvParams& p, const Tiling& tiling) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    const int64_t row = index / tiling.tiles;
    tile = index - row * tiling.tiles;
    b = row / p.channels;
    c = row - b * p.channels;
    begin = tile * tiling.steps;
    end = begin + tiling.steps < p.seqlen ? begin + tiling.steps : p.seqlen;
    return b < p.batch;
  }
};

template <typename Scalar>
struct RowWeights {
  using Acc = AccumulateType<Scalar>;
  Acc weight[kMaxVectorWidth], bias;
  int width;

  __device__ __forceinline__ RowWeights(const ConvParams& p, int64_t c) : width(static_cast<int>(p.width)) {
#pragma unroll
    for (int lag = 0; lag < kMaxVectorWidth; ++lag) weight[lag] = lag < width ? load_weight<Scalar>(p, c, lag) : Acc(0);
    bias = load_bias<Scalar>(p, c);
  }

  // inputs[kBefore + i] is step i's, those before it come before it.
  template <int size>
  __device__ __forceinline__ Acc sum(const Acc (&inputs)[size], int i) const {
    Acc result = bias;
    if (width > 3) result = Math<Acc>::fma(weight[3], inputs[i], result);
    if (width > 2) result = Math<Acc>::fma(weight[2], inputs[i + 1], result);
    if (width > 1) result = Math<Acc>::fma(weight[1], inputs[i + 2], result);
    return Math<Acc>::fma(weight[0], inputs[i + 3], result);
  }
};

// The inputs of the kBefore steps before step t.
template <typename Scalar>
__device__ __forceinline__ void load_row_before(const ConvParams& p, int64_t b, int64_t t, int64_t c,
                                                AccumulateType<Scalar> (&before)[kBefore]) {
#pragma unroll
  for (int lag = 1; lag <= kBefore; ++lag) {
    before[kBefore - lag] = lag < p.width ? to_accumulate(element_before<Scalar>(p, b, t, c, lag)) : AccumulateType<Scalar>(0);
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps) conv_fwd_rows_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar), kWarpSteps = kVector * kWarpSize, kAhead = 4;
  static_assert(kVector >= kBefore, "the steps before a lane's first are one lane's");
  using Inputs = cuda::Vector<Scalar, kVector>;
  const int lane = threadIdx.x % kWarpSize;
  RowPiece piece;
  if (!piece.find(p, tiling)) return;
  const RowWeights<Scalar> weights(p, piece.c);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(piece.b, 0, piece.c);
  Scalar* const out = static_cast<Scalar*>(p.out.data) + p.out.offset(piece.b, 0, piece.c);
  Acc carry[kBefore];
  load_row_before<Scalar>(p, piece.b, piece.begin, piece.c, carry);

  for (int64_t begin = piece.begin; begin < piece.end; begin += kAhead * kWarpSteps) {
    Inputs loaded[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = begin + j * kWarpSteps + lane * kVector;
      loaded[j] = t < piece.end ? Inputs::load_once(x + t) : Inputs::zero();
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = begin + j * kWarpSteps + lane * kVector;
      Acc inputs[kBefore + kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) inputs[kBefore + i] = loaded[j].accumulate(i);
#pragma unroll
      for (int i = 0; i < kBefore; ++i) {
        inputs[i] = __shfl_up_sync(~0u, inputs[kVector + i], 1);
        if (lane == 0) inputs[i] = carry[i];
        carry[i] = __shfl_sync(~0u, inputs[kVector + i], kWarpSize - 1);
      }
      if (t >= piece.end) continue;
      Acc outputs[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        outputs[i] = weights.sum(inputs, i);
        if (p.has_silu) outputs[i] = silu(outputs[i]);
      }
      Inputs::round(outputs).store_once(out + t);
    }
  }
  if (p.final_state.data != nullptr && piece.end == p.seqlen && lane == 0) {
    store_final_state<Scalar>(p, p.final_state, piece.b, p.seqlen - 1, piece.c);
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    conv_bwd_rows_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar), kWarpSteps = kVector * kWarpSize;
  using Inputs = cuda::Vector<Scalar, kVector>;
  const int lane = threadIdx.x % kWarpSize;
  RowPiece piece;
  if (!piece.find(p, tiling)) return;
  const RowWeights<Scalar> weights(p, piece.c);
  const bool has_grad_out = p.grad_out.data != nullptr;
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(piece.b, 0, piece.c);
  const Scalar* const grad_out = static_cast<const Scalar*>(p.grad_out.data) + p.grad_out.offset(piece.b, 0, piece.c);
  Scalar* const grad_x = static_cast<Scalar*>(p.grad_x.data) + p.grad_x.offset(piece.b, 0, piece.c);

  // g at the kBefore steps from t on, zero after the sequence.
  Acc carry[kBefore];
  const auto load_grad_pre = [&](int64_t t) {
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      carry[i] = 0;
      if (t + i >= p.seqlen || !has_grad_out) continue;
      carry[i] = to_accumulate(grad_out[t + i]);
      if (!p.has_silu) continue;
      Acc inputs[kBefore + 1];
      Acc before[kBefore];
      load_row_before<Scalar>(p, piece.b, t + i, piece.c, before);
#pragma unroll
      for (int k = 0; k < kBefore; ++k) inputs[k] = before[k];
      inputs[kBefore] = to_accumulate(x[t + i]);
      carry[i] *= silu_derivative(weights.sum(inputs, 0));
    }
  };
  load_grad_pre(piece.end);

  Acc grad_weight[kMaxVectorWidth] = {}, grad_bias = 0;
  const int64_t blocks = (piece.end - piece.begin + kWarpSteps - 1) / kWarpSteps;
  for (int64_t block = blocks - 1; block >= 0; --block) {
    const int64_t t = piece.begin + block * kWarpSteps + lane * kVector;
    const bool has_steps = t < piece.end;
    const Inputs loaded = has_steps ? Inputs::load_once(x + t) : Inputs::zero();
    const Inputs grads = has_steps && has_grad_out ? Inputs::load_once(grad_out + t) : Inputs::zero();
    Acc inputs[kBefore + kVector], grad_pre[kVector + kBefore];
#pragma unroll
    for (int i = 0; i < kVector; ++i) inputs[kBefore + i] = loaded.accumulate(i);
#pragma unroll
    for (int i = 0; i < kBefore; ++i) inputs[i] = __shfl_up_sync(~0u, inputs[kVector + i], 1);
    if (lane == 0) {
      Acc before[kBefore];
      load_row_before<Scalar>(p, piece.b, t, piece.c, before);
#pragma unroll
      for (int i = 0; i < kBefore; ++i) inputs[i] = before[i];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      grad_pre[i] = grads.accumulate(i);
      if (p.has_silu && has_grad_out && has_steps) grad_pre[i] *= silu_derivative(weights.sum(inputs, i));
    }
    // What comes after the last lane that has steps is the carry.
    const bool is_last = lane == kWarpSize - 1 || t + kVector >= piece.end;
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      const Acc above = __shfl_down_sync(~0u, grad_pre[i], 1);
      grad_pre[kVector + i] = is_last ? carry[i] : above;
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) carry[i] = __shfl_sync(~0u, grad_pre[i], 0);
    if (!has_steps) continue;

    Acc grad_inputs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      grad_inputs[i] = weights.weight[0] * grad_pre[i];
      if (weights.width > 1) grad_inputs[i] = Math<Acc>::fma(weights.weight[1], grad_pre[i + 1], grad_inputs[i]);
      if (weights.width > 2) grad_inputs[i] = Math<Acc>::fma(weights.weight[2], grad_pre[i + 2], grad_inputs[i]);
      if (weights.width > 3) grad_inputs[i] = Math<Acc>::fma(weights.weight[3], grad_pre[i + 3], grad_inputs[i]);
#pragma unroll
      for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
        grad_weight[lag] = Math<Acc>::fma(grad_pre[i], inputs[kBefore + i - lag], grad_weight[lag]);
      }
      grad_bias += grad_pre[i];
    }
    if (p.grad_final_state.data != nullptr && t + kVector + kBefore > p.seqlen) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        grad_inputs[i] += load_grad_final<Scalar>(p, piece.b, p.seqlen - 1, piece.c, p.seqlen - 1 - t - i);
      }
    }
    if (p.grad_x.data != nullptr) Inputs::round(grad_inputs).store_once(grad_x + t);
  }

  if (sums == nullptr) return;
  Acc* const target = sums + (piece.b * tiling.tiles + piece.tile) * (p.width + 1) * p.channels + piece.c;
  const auto sum_of_lanes = [](Acc value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
  };
#pragma unroll
  for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
    const Acc sum = sum_of_lanes(grad_weight[lag]);
    if (lane == 0 && lag < weights.width) target[lag * p.channels] = sum;
  }
  const Acc sum = sum_of_lanes(grad_bias);
  if (lane == 0) target[p.width * p.channels] = sum;
}

}  // namespace ssm_kernels::causal_conv1d
