// Forward of the causal convolution for channels-last tensors (batch, seqlen, channels); causal_conv1d.h has the formula.
//
// A block takes kWarps consecutive segments of `steps` steps of one batch row, one per warp. A lane owns kLaneChannels
// channels and advances in time, with their taps and the last kHalo inputs in registers. A warp thus reads and writes
// contiguous memory, each element once; only the kHalo steps before its segment are read twice. channels_last_rows.cuh has the
// accesses, to rows of aligned vectors and to shifted rows.
//
// The main loop computes kAhead steps per iteration, while cp.async copies the inputs of later iterations into stages of shared
// memory, which belong to the lane or, with shifted rows, to the warp. Near the ends of packed sequences a second loop computes
// one step at a time: where a sequence begins, it replaces the last inputs by the sequence's initial state. In padding it only
// stores zeros. A sequence is padding as a whole and never begins in the main loop, so that loop does not test for padding.
//
// The channels-last kernels are compiled twice for each kind of rows. The specialized one takes batch rows of one sequence and
// a width of kMaxVectorWidth, and tests neither in its loops; the other takes packed sequences and smaller widths.
// Forward has it for shifted rows only: channels_last_run_fwd.cuh takes aligned ones, unless the weights are not contiguous.
#pragma once

#include "causal_conv1d/cuda/channels_last_rows.cuh"
#include "causal_conv1d/cuda/states.cuh"

namespace ssm_kernels::causal_conv1d {

// The inputs of a lane's channels 1 to kHalo steps before step t, from x or from the initial state of t's sequence.
template <typename Scalar, bool is_specialized, bool is_shifted>
__device__ __forceinline__ void load_before(const ConvParams& p, const ChannelsLastSegment<Scalar, is_shifted>& segment,
                                            const ChannelsLastRows<const Scalar, is_shifted>& x, int64_t t,
                                            AccumulateType<Scalar> (&before)[kHalo][kLaneChannels]) {
  const int64_t b = segment.b, most = kHalo;
  const int64_t since = is_specialized ? (t < most ? t : most) : steps_since_first(p, b, t, most);
#pragma unroll
  for (int lag = 1; lag < kMaxVectorWidth; ++lag) {
    if (lag <= since) {
      if constexpr (is_shifted) {
        to_channels(x.load(static_cast<int>(t) - lag), before[lag - 1]);
      } else {
        const auto* const row = static_cast<const Scalar*>(p.x.data) + p.x.offset(b, t - lag, segment.c);
        to_channels(cuda::Vector<Scalar, kLaneChannels>::load(row), before[lag - 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        before[lag - 1][i] = lag < p.width && segment.has_channel(p, i)
                                 ? to_accumulate(load_initial<Scalar>(p, b, t - since, segment.channel(i), lag - since))
                                 : AccumulateType<Scalar>(0);
      }
    }
  }
}

template <typename Scalar, bool is_specialized, bool is_shifted>
__global__ void __launch_bounds__(kWarpSize* kWarps, is_specialized ? kFwdBlocks : kFwdBlocks / 2)
    conv_fwd_channels_last_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kLaneChannels, kAhead = sizeof(Scalar) > 2 ? 4 : 8;
  using Inputs = ChannelsLastRows<const Scalar, is_shifted>;
  // Pipeline stages of kAhead steps: one in use, the others being copied.
  constexpr int kStages = 3;
  __shared__ typename Inputs::Stage stages[kStages][kAhead];
  static_assert(sizeof(stages) <= 48 * 1024, "a block has at most 48 KiB of static shared memory");
  const ChannelsLastSegment<Scalar, is_shifted> segment(p, tiling);
  if (!segment.has_channels || segment.t >= segment.end) return;
  const Inputs x(p.x, p, segment);
  const ChannelsLastRows<Scalar, is_shifted> out(p.out, p, segment);
  const int width = is_specialized ? kMaxVectorWidth : static_cast<int>(p.width);
  const Taps<Scalar, kVector, segment.kDistance> taps(p, width, segment.c);
  Acc before[kHalo][kVector];
  load_before<Scalar, is_specialized, is_shifted>(p, segment, x, segment.t, before);

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
    out.store(t, outputs);
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
    for (int i = 0; i < kVector; ++i) {
      if (segment.has_channel(p, i)) store_final_state<Scalar>(p, segment.b, t, segment.channel(i), is_padding);
    }
  };
  int t = segment.t;
  bool is_inner = !is_padding(t) && are_inner(t);
#pragma unroll 1
  while (t < segment.end) {
    if (is_inner) {
      int stage = 0;
      const auto start_copies = [&](int t, int stage) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) x.start_copy(t + j, stages[stage][j]);
      };
      Inputs::sync();
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
          Inputs::sync();
          if (is_next_inner) start_copies(t + 2 * kAhead, stage == 0 ? kStages - 1 : stage - 1);
          cuda::cp_async_commit();
          cuda::cp_async_wait<kStages - 1>();
          Inputs::sync();
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            Acc inputs[kVector];
            to_channels(x.staged(t + j, stages[stage][j]), inputs);
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
        out.store_zero(t);
      } else {
        if (!is_specialized && t > segment.t && p.is_first_step(segment.b, t)) {
          load_before<Scalar, is_specialized, is_shifted>(p, segment, x, t, before);
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
