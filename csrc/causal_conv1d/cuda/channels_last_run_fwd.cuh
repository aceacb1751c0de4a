// Forward of the causal convolution for channels-last tensors, of aligned rows, one sequence a batch row, a width of
// kMaxVectorWidth and contiguous weights.
//
// A warp takes a run of steps of kWarpSize * kLaneChannels channels. Blocks are numbered by channels, tiles of kWarps runs and
// batch rows. A lane owns kLaneChannels neighboring channels and keeps a chunk of kSteps rows in registers, with the kHalo rows
// before it. It loads the next chunk before it computes this one. Latency decides short calls: the loads of the first chunk
// come before anything else, and no load waits for another. Rows after the run's last one are loads of that row, so that no
// load has a condition. The kHalo rows before a run are the last ones of the warp below, mostly in the same block, whose L1
// cache has them.
//
// The kernel has parameters of its own: a multiprocessor fetches each cache line of a kernel's parameters once it is read, and
// a warp waits for it. The first two lines have all that a call without states needs.
#pragma once

#include "causal_conv1d/cuda/taps.cuh"
#include "cuda/index_math.cuh"

namespace ssm_kernels::causal_conv1d {

// The parameters of a launch for the batch rows from `first` on. Strides of x and out are in bytes.
struct ConvRunParams {
  const char* x;
  int64_t x_stride_batch;
  int x_stride_step, seqlen, channels;
  int steps;  // of a run
  const void *weight, *bias;
  bool weight_is_input_kind, bias_is_input_kind, has_silu;
  int out_stride_step;
  char* out;
  int64_t out_stride_batch;
  StateView final_state, initial_state;

  ConvRunParams(const ConvFwdParams& p, const Tiling& tiling, int64_t bytes, int64_t first)
      : x(static_cast<const char*>(p.x.data) + first * p.x.stride_batch * bytes),
        x_stride_batch(p.x.stride_batch * bytes),
        x_stride_step(static_cast<int>(p.x.stride_step * bytes)),
        seqlen(static_cast<int>(p.seqlen)),
        channels(static_cast<int>(p.channels)),
        steps(static_cast<int>(tiling.steps)),
        weight(p.weight.data),
        bias(p.bias.data),
        weight_is_input_kind(p.weight.is_input_kind),
        bias_is_input_kind(p.bias.is_input_kind),
        has_silu(p.has_silu),
        out_stride_step(static_cast<int>(p.out.stride_step * bytes)),
        out(static_cast<char*>(p.out.data) + first * p.out.stride_batch * bytes),
        out_stride_batch(p.out.stride_batch * bytes),
        final_state(p.final_state),
        initial_state(p.initial_state) {
    const auto skip = [&](StateView& view) {
      if (view.data != nullptr) view.data = static_cast<char*>(view.data) + first * view.stride_sequence * bytes;
    };
    skip(final_state);
    skip(initial_state);
  }
};

// The taps of a lane's channels, by vectors: the weights of a channel are contiguous, and so are those of neighboring channels.
template <typename Scalar>
__device__ __forceinline__ Taps<Scalar, kLaneChannels> load_run_taps(const ConvRunParams& p, int c) {
  using Acc = AccumulateType<Scalar>;
  Taps<Scalar, kLaneChannels> taps;
  const auto load_weight = [&](const auto* weight) {
    using Element = std::decay_t<decltype(*weight)>;
    constexpr int kWidth = kMaxVectorWidth;
    const auto loaded = cuda::Vector<Element, kWidth * kLaneChannels>::load(weight + static_cast<int64_t>(c) * kWidth);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
#pragma unroll
      for (int lag = 0; lag < kWidth; ++lag) taps.weight[lag][i] = loaded.accumulate(i * kWidth + kWidth - 1 - lag);
    }
  };
  const auto load_bias = [&](const auto* bias) {
    const auto loaded = cuda::Vector<std::decay_t<decltype(*bias)>, kLaneChannels>::load(bias + c);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) taps.bias[i] = loaded.accumulate(i);
  };
  if (p.bias == nullptr) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) taps.bias[i] = 0;
  } else {
    p.bias_is_input_kind ? load_bias(static_cast<const Scalar*>(p.bias)) : load_bias(static_cast<const Acc*>(p.bias));
  }
  p.weight_is_input_kind ? load_weight(static_cast<const Scalar*>(p.weight)) : load_weight(static_cast<const Acc*>(p.weight));
  return taps;
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps, kRunBlocks) conv_fwd_channels_last_run_kernel(const ConvRunParams p) {
  using Acc = AccumulateType<Scalar>;
  using Row = cuda::Vector<Scalar, kLaneChannels>;
  constexpr int kSteps = static_cast<int>(run_steps(sizeof(Scalar))), kGroup = static_cast<int>(kLeastRun);
  static_assert(kSteps % kGroup == 0 && kGroup >= kHalo, "a run has the rows before the next one");
  static_assert(Row::kAccesses == 1, "one instruction loads a row");
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int c = static_cast<int>(blockIdx.x * kWarpSize + lane) * kLaneChannels;
  const int begin = static_cast<int>(blockIdx.y * kWarps + warp) * p.steps;
  const int64_t b = blockIdx.z;
  if (c >= p.channels || begin >= p.seqlen) return;
  const int end = begin + p.steps < p.seqlen ? begin + p.steps : p.seqlen;
  const char* const x = p.x + b * p.x_stride_batch + c * static_cast<int64_t>(sizeof(Scalar));
  // By an instruction for global memory, and cached: no other thread writes x.
  const auto load = [&](int t) {
    Row row;
    row.accesses[0] = __ldg(reinterpret_cast<const typename Row::Access*>(cuda::add_product(x, t, p.x_stride_step)));
    return row;
  };
  const auto load_chunk = [&](int t, Row* rows) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) rows[j] = load(t + j < end ? t + j : end - 1);
  };
  Row rows[kHalo + kSteps];
  load_chunk(begin, rows + kHalo);
#pragma unroll
  for (int j = 0; j < kHalo; ++j) rows[j] = begin > 0 ? load(begin + j - kHalo) : Row::zero();
  const auto initial_at = [&](int64_t channel, int64_t j) {
    return static_cast<const Scalar*>(p.initial_state.data)[p.initial_state.offset(b, channel, j)];
  };
  if (begin == 0 && p.initial_state.data != nullptr) {
#pragma unroll
    for (int j = 0; j < kHalo; ++j) {
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) rows[j].set(i, initial_at(c + i, j));
    }
  }
  const Taps<Scalar, kLaneChannels> taps = load_run_taps<Scalar>(p, c);
  char* const out = p.out + b * p.out_stride_batch + c * static_cast<int64_t>(sizeof(Scalar));
  int t = begin;
#pragma unroll 1
  while (true) {
    Row next[kSteps];
    const bool has_next = t + kSteps < end;
    if (has_next) load_chunk(t + kSteps, next);
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroup) {
      if (first > 0 && t + first >= end) break;
      Acc outputs[kGroup][kLaneChannels];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
          outputs[j][i] =
              taps.convolve(kMaxVectorWidth, i, [&](int lag) { return rows[kHalo + first + j - lag].accumulate(i); });
        }
      }
      if (p.has_silu) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
#pragma unroll
          for (int i = 0; i < kLaneChannels; ++i) outputs[j][i] = silu(outputs[j][i]);
        }
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        const int step = t + first + j;
        if (step < end) {
          Row::round(outputs[j]).store_once(reinterpret_cast<Scalar*>(cuda::add_product(out, step, p.out_stride_step)));
        }
      }
    }
    if (!has_next) break;
#pragma unroll
    for (int j = 0; j < kHalo; ++j) rows[j] = rows[kSteps + j];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) rows[kHalo + j] = next[j];
    t += kSteps;
  }
  if (p.final_state.data == nullptr || end < p.seqlen) return;
  // The last kHalo elements of the initial state followed by the steps.
#pragma unroll 1
  for (int j = 0; j < kHalo; ++j) {
    const int step = end - kHalo + j;
#pragma unroll 1
    for (int i = 0; i < kLaneChannels; ++i) {
      Scalar value = from_accumulate<Scalar>(Acc(0));
      if (step >= 0) {
        value = reinterpret_cast<const Scalar*>(cuda::add_product(x, step, p.x_stride_step))[i];
      } else if (p.initial_state.data != nullptr) {
        value = initial_at(c + i, end + j);
      }
      static_cast<Scalar*>(p.final_state.data)[p.final_state.offset(b, c + i, j)] = value;
    }
  }
}

}  // namespace ssm_kernels::causal_conv1d
