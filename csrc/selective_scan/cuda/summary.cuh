// Kernels of the summary on CUDA besides the carry pass: step sums, the decay of an exponential transition, and the fold of
// segments.
//
// A block of the step sums takes kSumSteps steps. If channels are closer in memory than steps, a lane takes a vector of
// channels, and the warps take steps in turn; else a warp takes a channel, and its lanes take vectors of steps in turn. Loads
// of the first kind are the widest where the rows are aligned and all vectors whole, of the second where the rows are aligned.
// The limits are memory and, with softplus, the issue rate.
#pragma once

#include "cuda/lane_sums.cuh"
#include "selective_scan/cuda/device.cuh"
#include "selective_scan/cuda/summary.h"

namespace ssm_kernels::selective_scan {

constexpr int kSummaryWarps = 8, kSummaryThreads = kSummaryWarps * kWarpSize;

struct StepSums {
  SequenceView delta;
  ChannelView bias;
  int64_t dim = 0, seqlen = 0;
  bool apply_softplus = false;
  bool moves_vectors = false;
  int64_t tiles = 0, parts = 0;  // of the channels and of the steps
  double* sums = nullptr;        // (batch, dim, parts)
};

// A block's tile of channels and part of the steps.
struct StepSumsPosition {
  int64_t batch, tile, part, begin, end;

  __device__ __forceinline__ explicit StepSumsPosition(const StepSums& p) {
    const int64_t tile_of_batch = blockIdx.x / p.parts;
    part = blockIdx.x - tile_of_batch * p.parts;
    batch = tile_of_batch / p.tiles;
    tile = tile_of_batch - batch * p.tiles;
    begin = part * kSumSteps;
    end = min(begin + kSumSteps, p.seqlen);
  }
};

template <typename Acc>
__device__ __forceinline__ double step_size(Acc delta, Acc bias, bool apply_softplus) {
  const Acc biased = delta + bias;
  return static_cast<double>(apply_softplus ? softplus(biased) : biased);
}

template <typename Acc>
__device__ __forceinline__ Acc bias_of(const StepSums& p, int64_t channel) {
  return p.bias.data != nullptr ? static_cast<const Acc*>(p.bias.data)[channel * p.bias.stride] : Acc(0);
}

template <typename Scalar>
__global__ void __launch_bounds__(kSummaryThreads) step_sums_along_channels_kernel(const __grid_constant__ StepSums p) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorSize<Scalar>, kTileChannels = kWarpSize * kVector;
  __shared__ double shared[kSummaryWarps][kTileChannels];
  const StepSumsPosition at(p);
  const int warp = threadIdx.x / kWarpSize, first = threadIdx.x % kWarpSize * kVector;
  const int64_t first_channel = at.tile * kTileChannels + first;
  const int count = static_cast<int>(max(int64_t(0), min(p.dim - first_channel, int64_t(kVector))));

  double sums[kVector] = {};
  Acc bias[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) bias[j] = j < count ? bias_of<Acc>(p, first_channel + j) : Acc(0);
  const Scalar* const source =
      static_cast<const Scalar*>(p.delta.data) + at.batch * p.delta.stride_batch + first_channel * p.delta.stride_dim;
  const auto add = [&](const Vector<Scalar, kVector>& values) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[j] += step_size(values.accumulate(j), bias[j], p.apply_softplus);
  };
  if (p.moves_vectors) {
    const int64_t end = count > 0 ? at.end : at.begin;
#pragma unroll 4
    for (int64_t step = at.begin + warp; step < end; step += kSummaryWarps) {
      add(Vector<Scalar, kVector>::load_once(source + step * p.delta.stride_step));
    }
  } else {
#pragma unroll 1
    for (int64_t step = at.begin + warp; step < at.end; step += kSummaryWarps) {
      auto values = Vector<Scalar, kVector>::zero();
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < count) values.set(j, source[step * p.delta.stride_step + j * p.delta.stride_dim]);
      }
      add(values);
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) shared[warp][first + j] = sums[j];
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t channel = at.tile * kTileChannels + thread;
  if (thread >= kTileChannels || channel >= p.dim) return;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kSummaryWarps; ++i) sum += shared[i][thread];
  p.sums[(at.batch * p.dim + channel) * p.parts + at.part] = sum;
}

template <typename Scalar>
__global__ void __launch_bounds__(kSummaryThreads) step_sums_along_steps_kernel(const __grid_constant__ StepSums p) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorSize<Scalar>;
  static_assert(kSumSteps % (kWarpSize * kVector) == 0, "parts begin at a multiple of a vector");
  const StepSumsPosition at(p);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t channel = at.tile * kSummaryWarps + threadIdx.x / kWarpSize;
  if (channel >= p.dim) return;
  const Scalar* const source =
      static_cast<const Scalar*>(p.delta.data) + at.batch * p.delta.stride_batch + channel * p.delta.stride_dim;
  const Acc bias = bias_of<Acc>(p, channel);
  double sum = 0;
  const int64_t end_of_vectors = p.moves_vectors ? at.end / kVector * kVector : at.begin;
#pragma unroll 4
  for (int64_t step = at.begin + lane * kVector; step < end_of_vectors; step += kWarpSize * kVector) {
    const auto values = Vector<Scalar, kVector>::load_once(source + step);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += step_size(values.accumulate(j), bias, p.apply_softplus);
  }
#pragma unroll 4
  for (int64_t step = end_of_vectors + lane; step < at.end; step += kWarpSize) {
    sum += step_size(to_accumulate(source[step * p.delta.stride_step]), bias, p.apply_softplus);
  }
  sum = cuda::sum_over_warp(sum);
  if (lane == 0) p.sums[(at.batch * p.dim + channel) * p.parts + at.part] = sum;
}

// A warp for each channel of each batch row.
template <typename Acc>
__global__ void __launch_bounds__(kSummaryThreads)
    exponential_decay_kernel(const double* sums, int64_t parts, StateView A, int64_t batch, int64_t dim, int64_t dstate,
                             Acc* decay) {
  const int64_t row = int64_t(blockIdx.x) * kSummaryWarps + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (row >= batch * dim) return;
  double sum = 0;
  for (int64_t part = lane; part < parts; part += kWarpSize) sum += sums[row * parts + part];
  sum = cuda::sum_over_warp(sum);
  for (int64_t n = lane; n < dstate; n += kWarpSize) {
    const Acc of_state = load_state<Acc>(A, 0, row % dim, static_cast<int>(n));
    decay[row * dstate + n] = static_cast<Acc>(exp(static_cast<double>(of_state) * sum));
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kSummaryThreads)
    fold_segments_kernel(const __grid_constant__ SegmentFold fold, int64_t rows, int64_t states) {
  const int64_t i = int64_t(blockIdx.x) * kSummaryThreads + threadIdx.x;
  if (i >= rows * states) return;
  const int64_t row = i / states, first = (row * fold.segments - row) * states + i;  // of the row's first segment
  Acc state = 0, product = 1;
#pragma unroll 4
  for (int64_t k = 0; k < fold.segments; ++k) {
    const int64_t index = first + (fold.is_adjoint ? fold.segments - 1 - k : k) * states;
    const cuda::AffineMap<Acc> map{static_cast<const Acc*>(fold.decay)[index], static_cast<const Acc*>(fold.offset)[index]};
    state = map(state);
    // A decay of zero stays zero, even if that of another segment has overflowed.
    product = product == 0 ? product : product * map.decay;
  }
  static_cast<Acc*>(fold.state)[i] = state;
  if (fold.product != nullptr) static_cast<Acc*>(fold.product)[i] = product;
}

inline unsigned int blocks_of(int64_t count, int64_t per_block) {
  return static_cast<unsigned int>(ceil_div(count, per_block));
}

template <typename Scalar>
cudaError_t launch_exponential_decay(const SelectiveScanParams& p, double* sums, void* decay, cudaStream_t stream) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kVector = kVectorSize<Scalar>;
  StepSums steps;
  steps.delta = p.delta;
  steps.bias = p.delta_bias;
  steps.dim = p.dim;
  steps.seqlen = p.seqlen;
  steps.apply_softplus = p.delta_softplus;
  steps.parts = step_sums_per_channel(p);
  steps.sums = sums;
  const bool along_channels = p.delta.stride_dim < p.delta.stride_step;
  const auto are_aligned = [&](int64_t stride) {
    return reinterpret_cast<int64_t>(p.delta.data) % kVectorBytes == 0 && p.delta.stride_batch % kVector == 0 &&
           stride % kVector == 0;
  };
  if (along_channels) {
    steps.tiles = ceil_div(p.dim, kWarpSize * kVector);
    steps.moves_vectors = p.delta.stride_dim == 1 && p.dim % kVector == 0 && are_aligned(p.delta.stride_step);
  } else {
    steps.tiles = ceil_div(p.dim, kSummaryWarps);
    steps.moves_vectors = p.delta.stride_step == 1 && are_aligned(p.delta.stride_dim);
  }
  auto* const kernel = along_channels ? step_sums_along_channels_kernel<Scalar> : step_sums_along_steps_kernel<Scalar>;
  if (const int64_t blocks = p.batch * steps.tiles * steps.parts; blocks > 0) {
    kernel<<<blocks_of(blocks, 1), kSummaryThreads, 0, stream>>>(steps);
  }
  exponential_decay_kernel<Acc><<<blocks_of(p.batch * p.dim, kSummaryWarps), kSummaryThreads, 0, stream>>>(
      sums, steps.parts, p.A, p.batch, p.dim, p.dstate, static_cast<Acc*>(decay));
  return cudaGetLastError();
}

template <typename Acc>
cudaError_t launch_fold(const SelectiveScanParams& p, const SegmentFold& fold, cudaStream_t stream) {
  const int64_t states = p.dim * p.dstate;
  fold_segments_kernel<Acc>
      <<<blocks_of(p.batch * states, kSummaryThreads), kSummaryThreads, 0, stream>>>(fold, p.batch, states);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::selective_scan
