// Kernels of the decay of a span, e^(A sum of delta).
//
// 1. A block sums kSumSteps steps, in double. If channels are closer in memory than steps, a lane takes a vector of channels,
//    and the warps take steps in turn; else a warp takes a channel, and its lanes take vectors of steps in turn. Loads of the
//    first kind are the widest where the rows are aligned and all vectors whole, of the second where the rows are aligned. The
//    limits are memory and, with softplus, the issue rate.
// 2. A warp adds the sums of a channel of a batch row in a fixed order, and takes the exponentials.
#pragma once

#include "common/activations.h"
#include "cuda/constants.h"
#include "cuda/lane_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/span_decay.h"
#include "cuda/vector_io.cuh"

namespace ssm_kernels::cuda {

constexpr int kDecayWarps = 8, kDecayThreads = kDecayWarps * kWarpSize;

struct StepSums {
  SpanDecay span;
  bool moves_vectors = false;
  int64_t tiles = 0;  // of the channels
};

// A block's tile of channels and part of the steps.
struct StepSumsPosition {
  int64_t batch, tile, part, begin, end;

  __device__ __forceinline__ explicit StepSumsPosition(const StepSums& p) {
    const int64_t parts = p.span.parts(), tile_of_batch = blockIdx.x / parts;
    part = blockIdx.x - tile_of_batch * parts;
    batch = tile_of_batch / p.tiles;
    tile = tile_of_batch - batch * p.tiles;
    begin = part * kSumSteps;
    end = min(begin + kSumSteps, p.span.seqlen);
  }
};

template <typename Acc>
__device__ __forceinline__ double step_size(const SpanDecay& span, Acc delta, Acc bias) {
  const Acc biased = delta + bias, size = span.apply_softplus ? softplus(biased) : biased;
  return static_cast<double>(clamp(size, static_cast<Acc>(span.dt_min), static_cast<Acc>(span.dt_max)));
}

template <typename Acc>
__device__ __forceinline__ Acc bias_of(const SpanDecay& span, int64_t channel) {
  return span.bias != nullptr ? static_cast<const Acc*>(span.bias)[channel * span.bias_stride] : Acc(0);
}

template <typename Scalar>
__global__ void __launch_bounds__(kDecayThreads) step_sums_along_channels_kernel(const __grid_constant__ StepSums p) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar)), kTileChannels = kWarpSize * kVector;
  __shared__ double shared[kDecayWarps][kTileChannels];
  const SpanDecay& span = p.span;
  const StepSumsPosition at(p);
  const int warp = threadIdx.x / kWarpSize, first = threadIdx.x % kWarpSize * kVector;
  const int64_t first_channel = at.tile * kTileChannels + first;
  const int count = static_cast<int>(max(int64_t(0), min(span.channels - first_channel, int64_t(kVector))));

  double sums[kVector] = {};
  Acc bias[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) bias[j] = j < count ? bias_of<Acc>(span, first_channel + j) : Acc(0);
  const Scalar* const source =
      static_cast<const Scalar*>(span.delta) + at.batch * span.stride_batch + first_channel * span.stride_channel;
  const auto add = [&](const Vector<Scalar, kVector>& values) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[j] += step_size(span, values.accumulate(j), bias[j]);
  };
  if (p.moves_vectors) {
    const int64_t end = count > 0 ? at.end : at.begin;
#pragma unroll 4
    for (int64_t step = at.begin + warp; step < end; step += kDecayWarps) {
      add(Vector<Scalar, kVector>::load_once(source + step * span.stride_step));
    }
  } else {
#pragma unroll 1
    for (int64_t step = at.begin + warp; step < at.end; step += kDecayWarps) {
      auto values = Vector<Scalar, kVector>::zero();
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < count) values.set(j, source[step * span.stride_step + j * span.stride_channel]);
      }
      add(values);
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) shared[warp][first + j] = sums[j];
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t channel = at.tile * kTileChannels + thread;
  if (thread >= kTileChannels || channel >= span.channels) return;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kDecayWarps; ++i) sum += shared[i][thread];
  span.sums[(at.batch * span.channels + channel) * span.parts() + at.part] = sum;
}

template <typename Scalar>
__global__ void __launch_bounds__(kDecayThreads) step_sums_along_steps_kernel(const __grid_constant__ StepSums p) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar));
  static_assert(kSumSteps % (kWarpSize * kVector) == 0, "parts begin at a multiple of a vector");
  const SpanDecay& span = p.span;
  const StepSumsPosition at(p);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t channel = at.tile * kDecayWarps + threadIdx.x / kWarpSize;
  if (channel >= span.channels) return;
  const Scalar* const source =
      static_cast<const Scalar*>(span.delta) + at.batch * span.stride_batch + channel * span.stride_channel;
  const Acc bias = bias_of<Acc>(span, channel);
  double sum = 0;
  const int64_t end_of_vectors = p.moves_vectors ? at.end / kVector * kVector : at.begin;
#pragma unroll 4
  for (int64_t step = at.begin + lane * kVector; step < end_of_vectors; step += kWarpSize * kVector) {
    const auto values = Vector<Scalar, kVector>::load_once(source + step);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += step_size(span, values.accumulate(j), bias);
  }
#pragma unroll 4
  for (int64_t step = end_of_vectors + lane; step < at.end; step += kWarpSize) {
    sum += step_size(span, to_accumulate(source[step * span.stride_step]), bias);
  }
  sum = sum_over_warp(sum);
  if (lane == 0) span.sums[(at.batch * span.channels + channel) * span.parts() + at.part] = sum;
}

// A warp for each channel of each batch row.
template <typename Acc>
__global__ void __launch_bounds__(kDecayThreads) span_decay_kernel(const __grid_constant__ SpanDecay p) {
  const int64_t row = int64_t(blockIdx.x) * kDecayWarps + threadIdx.x / kWarpSize, parts = p.parts();
  const int lane = threadIdx.x % kWarpSize;
  if (row >= p.batch * p.channels) return;
  double sum = 0;
  for (int64_t part = lane; part < parts; part += kWarpSize) sum += p.sums[row * parts + part];
  sum = sum_over_warp(sum);
  const Acc* const A = static_cast<const Acc*>(p.A) + row % p.channels * p.A_stride_channel;
  for (int64_t n = lane; n < p.states; n += kWarpSize) {
    static_cast<Acc*>(p.decay)[row * p.states + n] =
        static_cast<Acc>(::exp(static_cast<double>(A[n * p.A_stride_state]) * sum));
  }
}

template <typename Scalar>
cudaError_t launch_span_decay(const SpanDecay& span, cudaStream_t stream) {
  constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar));
  StepSums p;
  p.span = span;
  const bool along_channels = span.stride_channel < span.stride_step;
  const auto are_aligned = [&](int64_t stride) {
    return reinterpret_cast<int64_t>(span.delta) % kVectorBytes == 0 && span.stride_batch % kVector == 0 &&
           stride % kVector == 0;
  };
  if (along_channels) {
    p.tiles = ceil_div(span.channels, int64_t(kWarpSize * kVector));
    p.moves_vectors = span.stride_channel == 1 && span.channels % kVector == 0 && are_aligned(span.stride_step);
  } else {
    p.tiles = ceil_div(span.channels, int64_t(kDecayWarps));
    p.moves_vectors = span.stride_step == 1 && are_aligned(span.stride_channel);
  }
  auto* const kernel = along_channels ? step_sums_along_channels_kernel<Scalar> : step_sums_along_steps_kernel<Scalar>;
  if (const int64_t blocks = span.batch * p.tiles * span.parts(); blocks > 0) {
    const cudaError_t error = launch(kernel, blocks, kDecayThreads, 0, stream, /*uses_pdl=*/false, p);
    if (error != cudaSuccess) return error;
  }
  return launch(span_decay_kernel<AccumulateType<Scalar>>, ceil_div(span.batch * span.channels, int64_t(kDecayWarps)),
                kDecayThreads, 0, stream, /*uses_pdl=*/false, span);
}

}  // namespace ssm_kernels::cuda
