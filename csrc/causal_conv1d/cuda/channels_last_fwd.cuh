// Forward of the causal convolution for channels-last tensors (batch, seqlen, channels); causal_conv1d.h has the formula.
//
// A block takes kWarps consecutive segments of `steps` steps of one batch row, one per warp. A lane owns kLaneChannels
// neighboring channels and advances in time, with their taps and the last kHalo inputs in registers. A warp thus reads and
// writes contiguous memory, each element once; only the kHalo steps before its segment are read twice.
//
// The main loop computes kAhead steps per iteration, while cp.async copies the inputs of later iterations into stages of shared
// memory that belong to the lane and need no barrier. Near the ends of packed sequences a second loop computes one step at a
// time: where a sequence begins, it replaces the last inputs by the sequence's initial state. In padding it only stores
// zeros. A sequence is padding as a whole and never begins in the main loop, so that loop does not test for padding.
//
// The channels-last kernels are compiled twice. The specialized one takes batch rows of one sequence and a width of
// kMaxVectorWidth, and tests neither in its loops; the other takes packed sequences and smaller widths.
#pragma once

#include "causal_conv1d/cuda/device.cuh"
#include "cuda/index_math.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace ssm_kernels::causal_conv1d {

// A warp's segment, steps [t, end) of entry b, and a lane's first channel.
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

// A lane's channels in a channels-last tensor, a row per step. The address of a row takes one 32-bit multiplication;
// choose_kernels excludes tensors whose offsets need more.
template <typename Scalar>
class ChannelsLastRows {
 public:
  using Row = cuda::Vector<std::remove_const_t<Scalar>, kLaneChannels>;

  __device__ __forceinline__ ChannelsLastRows(const SequenceView& view, int64_t b, int64_t c)
      : base_(reinterpret_cast<Bytes*>(static_cast<Scalar*>(view.data) + view.offset(b, 0, c))),
        stride_(static_cast<int>(view.stride_step * static_cast<int64_t>(sizeof(Scalar)))) {}

  __device__ __forceinline__ Scalar* at(int t) const { return reinterpret_cast<Scalar*>(cuda::add_product(base_, t, stride_)); }
  // Bypasses the L1 cache.
  __device__ __forceinline__ Row load_once(int t) const { return Row::load_once(at(t)); }
  // Starts a copy into shared memory.
  __device__ __forceinline__ void start_copy(int t, Row& target) const { cuda::cp_async<Row::kBytes>(&target, at(t)); }
  __device__ __forceinline__ Row load(int t) const { return Row::load(at(t)); }
  __device__ __forceinline__ void store(int t, const Row& row) const { row.store_once(at(t)); }

 private:
  using Bytes = std::conditional_t<std::is_const_v<Scalar>, const char, char>;
  Bytes* base_;
  int stride_;
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

// The inputs of `vector` channels 1 to kHalo steps before step t, from x or from the initial state of t's sequence.
template <typename Scalar, int vector, bool is_specialized>
__device__ __forceinline__ void load_before(const ConvParams& p, int64_t b, int64_t t, int64_t c,
                                            AccumulateType<Scalar> (&before)[kHalo][vector]) {
  const int64_t most = kHalo;
  const int64_t since = is_specialized ? (t < most ? t : most) : steps_since_first(p, b, t, most);
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

template <typename Scalar, bool is_specialized>
__global__ void __launch_bounds__(kWarpSize* kWarps, is_specialized ? kFwdBlocks : kFwdBlocks / 2)
    conv_fwd_channels_last_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kLaneChannels, kAhead = sizeof(Scalar) > 2 ? 4 : 8;
  using Inputs = cuda::Vector<Scalar, kVector>;
  // Pipeline stages of kAhead steps: one in use, the others being copied. Each lane reads what it copied itself.
  constexpr int kStages = 3;
  __shared__ Inputs stages[kStages][kAhead][kWarpSize * kWarps];
  static_assert(sizeof(stages) <= 48 * 1024, "a block has at most 48 KiB of static shared memory");
  const ChannelsLastSegment segment(p, tiling, kVector);
  if (!segment.has_channels || segment.t >= segment.end) return;
  const ChannelsLastRows<const Scalar> x(p.x, segment.b, segment.c);
  const ChannelsLastRows<Scalar> out(p.out, segment.b, segment.c);
  const int width = is_specialized ? kMaxVectorWidth : static_cast<int>(p.width);
  const Taps<Scalar, kVector> taps(p, width, segment.c);
  Acc before[kHalo][kVector];
  load_before<Scalar, kVector, is_specialized>(p, segment.b, segment.t, segment.c, before);

  const auto step = [&](int t, const Acc(&inputs)[kVector], auto has_silu) {
    Acc outputs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      outputs[i] = taps.convolve(width, i, [&](int lag) { return lag == 0 ? inputs[i] : before[lag - 1][i]; });
#pragma unroll
      for (int lag = kHalo - 1; lag > 0; --lag) before[lag][i] = before[lag - 1][i];
      before[0][i] = inputs[i];
    }
    if (has_silu) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) outputs[i] = silu(outputs[i]);
    }
    out.store(t, Inputs::round(outputs));
  };
  // Whether the main loop takes steps t to t + kAhead - 1: they belong to one sequence, which continues after them.
  const auto are_inner = [&](int t) {
    if (t + kAhead > segment.end) return false;
    if constexpr (!is_specialized) {
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        if (t + i == p.seqlen || (t + i > segment.t && p.is_first_step(segment.b, t + i))) return false;
      }
    }
    return true;
  };
  const auto is_padding = [&](int t) { return !is_specialized && p.is_padding(segment.b, t); };
  const auto store_final_states = [&](int64_t t, bool is_padding) {
#pragma unroll 1
    for (int i = 0; i < kVector; ++i) store_final_state<Scalar>(p, segment.b, t, segment.c + i, is_padding);
  };
  int t = segment.t;
  bool is_inner = !is_padding(t) && are_inner(t);
#pragma unroll 1
  while (t < segment.end) {
    if (is_inner) {
      int stage = 0;
      const auto start_copies = [&](int t, int stage) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) x.start_copy(t + j, stages[stage][j][threadIdx.x]);
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
          if (is_next_inner) start_copies(t + 2 * kAhead, stage == 0 ? kStages - 1 : stage - 1);
          cuda::cp_async_commit();
          cuda::cp_async_wait<kStages - 1>();
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            Acc inputs[kVector];
            to_channels(stages[stage][j][threadIdx.x], inputs);
            step(t + j, inputs, has_silu);
          }
          stage = stage == kStages - 1 ? 0 : stage + 1;
          t += kAhead;
        } while (is_inner);
      };
      p.has_silu ? run(std::true_type()) : run(std::false_type());
    } else {
      const bool pads = is_padding(t);
      if (pads) {
        out.store(t, Inputs::zero());
      } else {
        if (!is_specialized && t > segment.t && p.is_first_step(segment.b, t)) {
          load_before<Scalar, kVector, is_specialized>(p, segment.b, t, segment.c, before);
        }
        Acc inputs[kVector];
        to_channels(x.load_once(t), inputs);
        step(t, inputs, p.has_silu);
      }
      if (!is_specialized && p.final_state.data != nullptr && p.is_last_step(segment.b, t)) store_final_states(t, pads);
      ++t;
      is_inner = !pads && are_inner(t);
    }
  }
  if constexpr (is_specialized) {
    if (p.final_state.data != nullptr && segment.end == p.seqlen) store_final_states(p.seqlen - 1, /*is_padding=*/false);
  }
}

}  // namespace ssm_kernels::causal_conv1d
