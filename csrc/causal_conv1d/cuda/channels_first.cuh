// The causal convolution for channels-first tensors, whose steps are contiguous: forward, and backward as in
// channels_last_bwd.cuh. Each row of the batch is one sequence.
//
// A warp has a tile of time of one channel and takes a vector of 16 bytes of neighboring steps for each lane per iteration.
// Forward advances in time, backward goes back. The three steps before a lane's first come from the lane below by shuffles, in
// backward also the three g after its last from the lane above; the lanes at the warp's ends exchange them with the vectors of
// the iteration before or after. A warp's sums for the gradients of weight and bias are added over its lanes by shuffles, in a
// fixed order.
#pragma once

#include "causal_conv1d/cuda/device.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace ssm_kernels::causal_conv1d {

// A warp's tile, [begin, end) of channel c.
struct ChannelsFirstSegment {
  int64_t b, c, tile, begin, end;

  // False if there is none. choose_kernels makes sure that the warps are counted in 32 bits.
  __device__ __forceinline__ bool find(const ConvParams& p, const Tiling& tiling) {
    const unsigned index = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
    const unsigned tiles = static_cast<unsigned>(tiling.tiles), channels = static_cast<unsigned>(p.channels);
    const unsigned row = index / tiles, batch = row / channels;
    tile = index - row * tiles;
    b = batch;
    c = row - batch * channels;
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
    const auto load = [&](const auto* tap) {
      tap += c * p.weight.stride_channel + (width - 1) * p.weight.stride_tap;
#pragma unroll
      for (int lag = 0; lag < kMaxVectorWidth; ++lag, tap -= p.weight.stride_tap) {
        weight[lag] = lag < width ? to_accumulate(*tap) : Acc(0);
      }
    };
    if (p.weight.is_input_kind) {
      load(static_cast<const Scalar*>(p.weight.data));
    } else {
      load(static_cast<const Acc*>(p.weight.data));
    }
    bias = load_bias<Scalar>(p, c);
  }

  // Sums the taps of step i, whose input is inputs[kBefore + i], in the order of the lags.
  template <int size>
  __device__ __forceinline__ Acc sum(const Acc (&inputs)[size], int i) const {
    Acc result = Math<Acc>::fma(weight[0], inputs[i + 3], bias);
    if (width > 1) result = Math<Acc>::fma(weight[1], inputs[i + 2], result);
    if (width > 2) result = Math<Acc>::fma(weight[2], inputs[i + 1], result);
    if (width > 3) result = Math<Acc>::fma(weight[3], inputs[i], result);
    return result;
  }
};

// The last kBefore elements of a lane's vector, as the words that shuffles move.
template <typename Scalar>
struct VectorTail {
  static constexpr int kElements = sizeof(Scalar) == 2 ? 4 : kBefore;  // whole words
  static constexpr int kWords = kElements * static_cast<int>(sizeof(Scalar)) / 4;
  uint32_t words[kWords];

  template <int size>
  __device__ __forceinline__ static VectorTail of(const cuda::Vector<Scalar, size>& vector) {
    VectorTail tail;
    memcpy(tail.words, reinterpret_cast<const char*>(vector.accesses) + (size - kElements) * sizeof(Scalar),
           sizeof(tail.words));
    return tail;
  }
  // Loads the kBefore steps before a tile's first: from the tile before, or from the initial state.
  __device__ __forceinline__ static VectorTail load(const ConvParams& p, const ChannelsFirstSegment& segment, const Scalar* x) {
    Scalar elements[kElements];
#pragma unroll
    for (int lag = 1; lag <= kElements; ++lag) {
      elements[kElements - lag] = from_accumulate<Scalar>(AccumulateType<Scalar>(0));
      if (lag < p.width) {
        elements[kElements - lag] =
            segment.begin > 0 ? x[segment.begin - lag] : load_initial<Scalar>(p, segment.b, 0, segment.c, lag);
      }
    }
    VectorTail tail;
    memcpy(tail.words, elements, sizeof(tail.words));
    return tail;
  }
  // The inputs before a lane's first, of the lane below; of lane 0, those of lane 31 of the vectors `earlier`.
  __device__ __forceinline__ void to_lane_above(const VectorTail& earlier, AccumulateType<Scalar>* before) const {
    const int lane = threadIdx.x % kWarpSize;
    VectorTail received;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t sent = lane == kWarpSize - 1 ? earlier.words[i] : words[i];
      received.words[i] = __shfl_sync(~0u, sent, (lane + kWarpSize - 1) % kWarpSize);
    }
    Scalar elements[kElements];
    memcpy(elements, received.words, sizeof(elements));
#pragma unroll
    for (int i = 0; i < kBefore; ++i) before[i] = to_accumulate(elements[kElements - kBefore + i]);
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    conv_fwd_channels_first_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  using Tail = VectorTail<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar), kWarpSteps = kVector * kWarpSize, kAhead = 4;
  static_assert(kVector >= Tail::kElements, "the steps before a lane's first are one lane's");
  using Inputs = cuda::Vector<Scalar, kVector>;
  const int lane = threadIdx.x % kWarpSize;
  ChannelsFirstSegment segment;
  if (!segment.find(p, tiling)) return;
  const RowWeights<Scalar> weights(p, segment.c);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(segment.b, 0, segment.c);
  Scalar* const out = static_cast<Scalar*>(p.out.data) + p.out.offset(segment.b, 0, segment.c);
  Tail earlier = Tail::load(p, segment, x);

  for (int64_t begin = segment.begin; begin < segment.end; begin += kAhead * kWarpSteps) {
    Inputs loaded[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = begin + j * kWarpSteps + lane * kVector;
      loaded[j] = t < segment.end ? Inputs::load_once(x + t) : Inputs::zero();
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = begin + j * kWarpSteps + lane * kVector;
      Acc inputs[kBefore + kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) inputs[kBefore + i] = loaded[j].accumulate(i);
      const Tail tail = Tail::of(loaded[j]);
      tail.to_lane_above(earlier, inputs);
      earlier = tail;
      if (t >= segment.end) continue;
      Acc outputs[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) outputs[i] = weights.sum(inputs, i);
      if (p.has_silu) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) outputs[i] = silu(outputs[i]);
      }
      Inputs::round(outputs).store_once(out + t);
    }
  }
  if (p.final_state.data != nullptr && segment.end == p.seqlen && lane == 0) {
    store_final_state<Scalar>(p, p.final_state, segment.b, p.seqlen - 1, segment.c);
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    conv_bwd_channels_first_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  using Tail = VectorTail<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar), kWarpSteps = kVector * kWarpSize;
  using Inputs = cuda::Vector<Scalar, kVector>;
  // Vectors of x and grad_out, each lane's by itself: one in use, the others being copied.
  constexpr int kStages = 4;
  __shared__ Inputs stages[kStages][2][kWarpSize * kWarps];
  const int lane = threadIdx.x % kWarpSize;
  ChannelsFirstSegment segment;
  if (!segment.find(p, tiling)) return;
  const RowWeights<Scalar> weights(p, segment.c);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(segment.b, 0, segment.c);
  const Scalar* const grad_out = static_cast<const Scalar*>(p.grad_out.data) + p.grad_out.offset(segment.b, 0, segment.c);
  Scalar* const grad_x = static_cast<Scalar*>(p.grad_x.data) + p.grad_x.offset(segment.b, 0, segment.c);

  // The gradient of the row's final state, which is its last width - 1 steps.
  const Scalar* const grad_final = p.grad_final_state.data == nullptr ? nullptr
                                                                      : static_cast<const Scalar*>(p.grad_final_state.data) +
                                                                            p.grad_final_state.offset(segment.b, segment.c, 0);

  // g at the kBefore steps after the present vectors, zero after the sequence. Lane 0 has them.
  Acc later[kBefore];
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    const int64_t t = segment.end + i;
    later[i] = 0;
    if (t >= p.seqlen) continue;
    later[i] = to_accumulate(grad_out[t]);
    if (!p.has_silu) continue;
    Acc inputs[kBefore + 1];
#pragma unroll
    for (int lag = 0; lag <= kBefore; ++lag) inputs[kBefore - lag] = to_accumulate(x[t - lag]);
    later[i] *= silu_derivative(weights.sum(inputs, 0));
  }

  Acc grad_weight[kMaxVectorWidth] = {}, grad_bias = 0;
  const int64_t begin = segment.begin + lane * kVector;
  int64_t t = begin + (segment.end - segment.begin - 1) / kWarpSteps * kWarpSteps;
  const auto start_copies = [&](int64_t t, int stage) {
    if (begin <= t && t < segment.end) {
      cuda::cp_async<kVectorBytes>(&stages[stage][0][threadIdx.x], x + t);
      cuda::cp_async<kVectorBytes>(&stages[stage][1][threadIdx.x], grad_out + t);
    }
    cuda::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) start_copies(t - i * kWarpSteps, i);
  const Tail first = Tail::load(p, segment, x);
#pragma unroll 1
  for (int stage = 0; t >= begin; t -= kWarpSteps, stage = (stage + 1) % kStages) {
    start_copies(t - (kStages - 1) * kWarpSteps, (stage + kStages - 1) % kStages);
    // This iteration's, and the next's, of which lane 31 has the inputs before lane 0's.
    cuda::cp_async_wait<kStages - 2>();
    const bool has_steps = t < segment.end;
    const Inputs loaded = has_steps ? stages[stage][0][threadIdx.x] : Inputs::zero();
    const Inputs grads = has_steps ? stages[stage][1][threadIdx.x] : Inputs::zero();
    Acc inputs[kBefore + kVector], grad_pre[kVector + kBefore];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      inputs[kBefore + i] = loaded.accumulate(i);
      grad_pre[i] = grads.accumulate(i);
    }
    const Tail earlier = t > begin ? Tail::of(stages[(stage + 1) % kStages][0][threadIdx.x]) : first;
    Tail::of(loaded).to_lane_above(earlier, inputs);
    if (p.has_silu) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) grad_pre[i] *= silu_derivative(weights.sum(inputs, i));
    }
    if (!has_steps) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) grad_pre[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      const Acc sent = lane == 0 ? later[i] : grad_pre[i];
      grad_pre[kVector + i] = __shfl_sync(~0u, sent, (lane + 1) % kWarpSize);
      later[i] = grad_pre[i];
    }
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
    if (grad_final != nullptr && t + kVector + kBefore > p.seqlen) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int64_t index = t + i - (p.seqlen - (p.width - 1));
        if (index >= 0) grad_inputs[i] += to_accumulate(grad_final[index * p.grad_final_state.stride_step]);
      }
    }
    if (p.grad_x.data != nullptr) Inputs::round(grad_inputs).store_once(grad_x + t);
  }

  if (sums == nullptr) return;
  Acc* const target = sums + (segment.b * tiling.tiles + segment.tile) * (p.width + 1) * p.channels + segment.c;
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
