// Forward of the causal convolution for channels-last tensors, of aligned rows, one sequence a batch row and a width of
// kMaxVectorWidth.
//
// Blocks, warps and lanes have the segments and channels of channels_last_fwd.cuh, but a warp has only few steps. A lane
// loads all of its inputs, with the kHalo steps before its segment, before it computes the first output: many short warps keep
// more loads in flight than few long ones that copy ahead, and no load waits for another. The steps before a segment are the
// last ones of the warp below, mostly in the same block, whose L1 cache has them.
//
// The threads of a block load the taps of one channel each and exchange them through shared memory: a lane's own loads of the
// taps of its kLaneChannels channels would take more cache lines than its inputs.
#pragma once

#include "causal_conv1d/cuda/channels_last_fwd.cuh"

namespace ssm_kernels::causal_conv1d {

// A parameter's bits. Converting them later lets other loads start first.
template <typename Scalar>
__device__ __forceinline__ uint32_t load_parameter_bits(const ParameterView& view, int64_t offset) {
  if (sizeof(Scalar) == 2 && view.is_input_kind) return static_cast<const unsigned short*>(view.data)[offset];
  return static_cast<const uint32_t*>(view.data)[offset];
}
template <typename Scalar>
__device__ __forceinline__ float parameter_from_bits(const ParameterView& view, uint32_t bits) {
  if (sizeof(Scalar) == 2 && view.is_input_kind) {
    Scalar value;
    memcpy(&value, &bits, sizeof(value));
    return to_accumulate(value);
  }
  return __uint_as_float(bits);
}

// The taps of a block's channels, by lag, then their biases.
struct BlockTaps {
  static constexpr int kChannels = kWarpSize * kLaneChannels;
  float values[kMaxVectorWidth + 1][kChannels];

  template <typename Scalar>
  struct Loaded {
    uint32_t weight[kMaxVectorWidth], bias;

    __device__ __forceinline__ Loaded(const ConvParams& p, int64_t c) {
      const bool exists = c < p.channels;
      const int64_t first = c * p.weight.stride_channel + (kMaxVectorWidth - 1) * p.weight.stride_tap;
#pragma unroll
      for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
        weight[lag] = exists ? load_parameter_bits<Scalar>(p.weight, first - lag * p.weight.stride_tap) : 0;
      }
      bias = exists && p.bias.data != nullptr ? load_parameter_bits<Scalar>(p.bias, c * p.bias.stride_channel) : 0;
    }
  };

  template <typename Scalar>
  __device__ __forceinline__ void set(const ConvParams& p, int channel, const Loaded<Scalar>& loaded) {
#pragma unroll
    for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
      values[lag][channel] = parameter_from_bits<Scalar>(p.weight, loaded.weight[lag]);
    }
    values[kMaxVectorWidth][channel] = parameter_from_bits<Scalar>(p.bias, loaded.bias);
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps, kRunBlocks<sizeof(Scalar)>)
    conv_fwd_channels_last_run_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  using Inputs = AlignedRows<const Scalar>;
  constexpr int kSteps = static_cast<int>(run_steps(sizeof(Scalar)));
  static_assert(BlockTaps::kChannels == kWarpSize * kWarps, "each thread loads the taps of one channel");
  __shared__ BlockTaps block_taps;
  const ChannelsLastSegment<Scalar, false> segment(p, tiling);
  const int lane = threadIdx.x % kWarpSize, count = segment.end - segment.t;
  const bool has_steps = segment.has_channels && count > 0;
  // First, as nothing is in registers yet.
  if (has_steps && p.final_state.data != nullptr && segment.end == p.seqlen) {
#pragma unroll 1
    for (int i = 0; i < kLaneChannels; ++i) {
      store_final_state<Scalar>(p, segment.b, p.seqlen - 1, segment.channel(i), /*is_padding=*/false);
    }
  }
  const BlockTaps::Loaded<Scalar> loaded(p, segment.c - lane * kLaneChannels + threadIdx.x);
  const Inputs x(p.x, p, segment);
  typename Inputs::Row rows[kHalo + kSteps] = {};
  if (has_steps) {
    if (segment.t > 0) {
#pragma unroll
      for (int j = 0; j < kHalo; ++j) rows[j] = x.load_read_only(segment.t + j - kHalo);
    } else if (p.initial_state.data != nullptr) {
#pragma unroll
      for (int j = 0; j < kHalo; ++j) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
          rows[j].set(i, load_initial<Scalar>(p, segment.b, 0, segment.channel(i), kHalo - j));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (j < count) rows[kHalo + j] = x.load_read_only(segment.t + j);
    }
  }
  block_taps.set<Scalar>(p, threadIdx.x, loaded);
  __syncthreads();
  if (!has_steps) return;
  const Taps<Scalar, kLaneChannels> taps(block_taps.values, lane * kLaneChannels);
  const AlignedRows<Scalar> out(p.out, p, segment);
  const auto run = [&](auto has_silu) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      Acc outputs[kLaneChannels];
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        outputs[i] = taps.convolve(kMaxVectorWidth, i, [&](int lag) { return rows[kHalo + j - lag].accumulate(i); });
        if (has_silu) outputs[i] = silu(outputs[i]);
      }
      if (j < count) out.store(segment.t + j, outputs);
    }
  };
  p.has_silu ? run(std::true_type()) : run(std::false_type());
}

}  // namespace ssm_kernels::causal_conv1d
