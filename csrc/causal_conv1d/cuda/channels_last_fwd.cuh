// Forward of the causal convolution for channels-last tensors.
//
// A lane has kLaneChannels neighboring channels and goes through `steps` steps of time, so that a warp reads and writes
// contiguous parts of rows, each element once; the width - 1 steps before its first are read twice. It keeps the
// channels' weights and the last three inputs in registers. A block's warps take consecutive intervals of time.
//
// The main loop takes kAhead steps per iteration. Each lane copies the next iteration's inputs into shared memory of its own
// meanwhile, which takes no registers and no barrier. Near the ends of packed sequences one step at a time checks whether
// another sequence begins, whose initial state then replaces the kept inputs.
//
// The kernels of steps are compiled twice: plain, for rows that are one sequence and a width of kMaxVectorWidth, so that their
// loops test neither; and for packed sequences or a smaller width.
#pragma once

#include "causal_conv1d/cuda/device.cuh"
#include "cuda/index_math.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace ssm_kernels::causal_conv1d {

// A lane's channels and a warp's steps, [t, end), of a block of the kernels of steps.
struct ChannelsLastSegment {
  int64_t b, c;
  int t, end;
  bool has_channels;

  __device__ __forceinline__ ChannelsLastSegment(const ConvParams& p, const Tiling& tiling, int vector) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned channel_blocks = static_cast<unsigned>(tiling.channel_blocks);
    const unsigned tiles = static_cast<unsigned>(tiling.tiles), tile = blockIdx.x / channel_blocks;
    const int64_t channel_block = blockIdx.x - tile * channel_blocks;
    b = tile / tiles;
    const int64_t first = ((tile - tile / tiles * tiles) * int64_t(kWarps) + warp) * tiling.steps;
    t = static_cast<int>(first < p.seqlen ? first : p.seqlen);
    end = static_cast<int>(first + tiling.steps < p.seqlen ? first + tiling.steps : p.seqlen);
    c = (channel_block * kWarpSize + lane) * vector;
    has_channels = c < p.channels;
  }
};

// The rows of one lane's channels in a channels-last tensor. A step's address is one multiplication of 32-bit numbers, which
// choose_kernels makes sure is enough.
template <typename Scalar>
class ChannelsLastRows {
 public:
  using Row = cuda::Vector<std::remove_const_t<Scalar>, kLaneChannels>;

  __device__ __forceinline__ ChannelsLastRows(const SequenceView& view, int64_t b, int64_t c)
      : base_(reinterpret_cast<Bytes*>(static_cast<Scalar*>(view.data) + view.offset(b, 0, c))),
        stride_(static_cast<int>(view.stride_step * static_cast<int64_t>(sizeof(Scalar)))) {}

  __device__ __forceinline__ Scalar* at(int t) const { return reinterpret_cast<Scalar*>(cuda::add_product(base_, t, stride_)); }
  // Past the first-level cache: for what one warp reads.
  __device__ __forceinline__ Row load_once(int t) const { return Row::load_once(at(t)); }
  // Into shared memory.
  __device__ __forceinline__ void start_copy(int t, Row& target) const { cuda::cp_async<Row::kBytes>(&target, at(t)); }
  __device__ __forceinline__ Row load(int t) const { return Row::load(at(t)); }
  __device__ __forceinline__ void store(int t, const Row& row) const { row.store_once(at(t)); }

 private:
  using Bytes = std::conditional_t<std::is_const_v<Scalar>, const char, char>;
  Bytes* base_;
  int stride_;
};

// The weights of a lane's channels by lag, those beyond the width zero, and their biases.
template <typename Scalar, int vector>
struct StepWeights {
  using Acc = AccumulateType<Scalar>;
  Acc weight[kMaxVectorWidth][vector], bias[vector];

  __device__ __forceinline__ StepWeights(const ConvParams& p, int width, int64_t c) {
    const auto load = [&](const auto* row) {
      row += c * p.weight.stride_channel + (width - 1) * p.weight.stride_tap;
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        const auto* tap = row + i * p.weight.stride_channel;
#pragma unroll
        for (int lag = 0; lag < kMaxVectorWidth; ++lag, tap -= p.weight.stride_tap) {
          weight[lag][i] = lag < width ? to_accumulate(*tap) : Acc(0);
        }
      }
    };
    if (p.weight.is_input_kind) {
      load(static_cast<const Scalar*>(p.weight.data));
    } else {
      load(static_cast<const Acc*>(p.weight.data));
    }
#pragma unroll
    for (int i = 0; i < vector; ++i) bias[i] = load_bias<Scalar>(p, c + i);
  }

  // bias + sum over the width of weight[lag] x_{t - lag}, in the order of the lags. Inputs beyond the width have no part in it,
  // not even as 0 NaN.
  __device__ __forceinline__ Acc sum(int width, int i, Acc x, const Acc (&before)[kBefore][vector]) const {
    Acc result = Math<Acc>::fma(weight[0][i], x, bias[i]);
    if (width > 1) result = Math<Acc>::fma(weight[1][i], before[0][i], result);
    if (width > 2) result = Math<Acc>::fma(weight[2][i], before[1][i], result);
    if (width > 3) result = Math<Acc>::fma(weight[3][i], before[2][i], result);
    return result;
  }
};

template <typename Acc, typename Row, int vector>
__device__ __forceinline__ void to_channels(const Row& row, Acc (&channels)[vector]) {
#pragma unroll
  for (int i = 0; i < vector; ++i) channels[i] = row.accumulate(i);
}

template <typename Acc, typename Row, int vector>
__device__ __forceinline__ void add_channels(const Row& row, Acc (&channels)[vector]) {
#pragma unroll
  for (int i = 0; i < vector; ++i) channels[i] += row.accumulate(i);
}

// The inputs of `vector` channels 1, 2 and 3 steps before step t of its sequence.
template <typename Scalar, int vector, bool is_plain>
__device__ __forceinline__ void load_before(const ConvParams& p, int64_t b, int64_t t, int64_t c,
                                            AccumulateType<Scalar> (&before)[kBefore][vector]) {
  const int64_t most = kBefore;
  const int64_t since = is_plain ? (t < most ? t : most) : steps_since_first(p, b, t, most);
#pragma unroll
  for (int lag = 1; lag < kMaxVectorWidth; ++lag) {
    if (lag <= since) {
      to_channels(cuda::Vector<Scalar, vector>::load(static_cast<const Scalar*>(p.x.data) + p.x.offset(b, t - lag, c)),
                  before[lag - 1]);
    } else {
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        before[lag - 1][i] = lag < p.width ? to_accumulate(load_initial<Scalar>(p, b, t - since, c + i, lag - since))
                                           : AccumulateType<Scalar>(0);
      }
    }
  }
}

template <typename Scalar, bool is_plain>
__global__ void __launch_bounds__(kWarpSize* kWarps, is_plain ? kFwdBlocks : kFwdBlocks / 2)
    conv_fwd_channels_last_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kLaneChannels, kAhead = sizeof(Scalar) > 2 ? 4 : 8;
  using Inputs = cuda::Vector<Scalar, kVector>;
  // Inputs of groups of steps, each lane's by itself: one group in use, the others being copied.
  constexpr int kGroups = 3;
  __shared__ Inputs ring[kGroups][kAhead][kWarpSize * kWarps];
  static_assert(sizeof(ring) <= 48 * 1024, "a block has no more static shared memory");
  const ChannelsLastSegment segment(p, tiling, kVector);
  if (!segment.has_channels || segment.t >= segment.end) return;
  const ChannelsLastRows<const Scalar> x(p.x, segment.b, segment.c);
  const ChannelsLastRows<Scalar> out(p.out, segment.b, segment.c);
  const int width = is_plain ? kMaxVectorWidth : static_cast<int>(p.width);
  const StepWeights<Scalar, kVector> weights(p, width, segment.c);
  Acc before[kBefore][kVector];
  load_before<Scalar, kVector, is_plain>(p, segment.b, segment.t, segment.c, before);

  const auto step = [&](int t, const Acc(&inputs)[kVector], auto has_silu) {
    Acc outputs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      outputs[i] = weights.sum(width, i, inputs[i], before);
#pragma unroll
      for (int lag = kBefore - 1; lag > 0; --lag) before[lag][i] = before[lag - 1][i];
      before[0][i] = inputs[i];
    }
    if (has_silu) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) outputs[i] = silu(outputs[i]);
    }
    out.store(t, Inputs::round(outputs));
  };
  // Whether steps t to t + kAhead - 1 are of one sequence, which goes on after them.
  const auto are_inner = [&](int t) {
    if (t + kAhead > segment.end) return false;
    if constexpr (!is_plain) {
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        if (t + i == p.seqlen || (t + i > segment.t && p.is_first_step(segment.b, t + i))) return false;
      }
    }
    return true;
  };
  int t = segment.t;
  bool is_inner = are_inner(t);
#pragma unroll 1
  while (t < segment.end) {
    if (is_inner) {
      int group = 0;
      const auto start_copies = [&](int t, int group) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) x.start_copy(t + j, ring[group][j][threadIdx.x]);
      };
      start_copies(t, 0);
      cuda::cp_async_commit();
      bool is_next_inner = are_inner(t + kAhead);
      if (is_next_inner) start_copies(t + kAhead, 1);
      cuda::cp_async_commit();
      const auto run = [&](auto has_silu) {
#pragma unroll 1
        do {
          is_inner = is_next_inner;
          is_next_inner = is_inner && are_inner(t + 2 * kAhead);
          if (is_next_inner) start_copies(t + 2 * kAhead, group == 0 ? kGroups - 1 : group - 1);
          cuda::cp_async_commit();
          cuda::cp_async_wait<kGroups - 1>();
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            Acc inputs[kVector];
            to_channels(ring[group][j][threadIdx.x], inputs);
            step(t + j, inputs, has_silu);
          }
          group = group == kGroups - 1 ? 0 : group + 1;
          t += kAhead;
        } while (is_inner);
      };
      p.has_silu ? run(std::true_type()) : run(std::false_type());
    } else {
      if (!is_plain && t > segment.t && p.is_first_step(segment.b, t)) {
        load_before<Scalar, kVector, is_plain>(p, segment.b, t, segment.c, before);
      }
      Acc inputs[kVector];
      to_channels(x.load_once(t), inputs);
      step(t, inputs, p.has_silu);
      if (!is_plain && p.final_state.data != nullptr && p.is_last_step(segment.b, t)) {
#pragma unroll 1
        for (int i = 0; i < kVector; ++i) store_final_state<Scalar>(p, p.final_state, segment.b, t, segment.c + i);
      }
      ++t;
      is_inner = are_inner(t);
    }
  }
  if constexpr (is_plain) {
    if (p.final_state.data != nullptr && segment.end == p.seqlen) {
#pragma unroll 1
      for (int i = 0; i < kVector; ++i) store_final_state<Scalar>(p, p.final_state, segment.b, p.seqlen - 1, segment.c + i);
    }
  }
}

}  // namespace ssm_kernels::causal_conv1d
