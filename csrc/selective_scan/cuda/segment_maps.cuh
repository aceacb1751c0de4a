// Segment maps of zoh on CUDA: what consecutive steps do to the state, without outputs.
//
//   h_t = e^(delta_t A) h_{t-1} + delta_t B_t u_t, from zero: offset = the last h        decay = e^(A sum of delta)
//   e_{t-1} = e^(delta_t A) (e_t + C_t g_t), backward from zero: offset = the first e    with z: g = grad_out silu(z)
//
// Shapes are those of the scan; u, g, delta and z may have any strides. Nothing is written for a step, and no state has to be
// read at a step, so that a lane keeps the states of two channels in registers over all of its steps: an exponential and three
// other instructions for a state and step. Exponentials are the limit: a multiprocessor computes 16 a clock.
//
// 1. segment_maps_kernel. A block takes one part, kPartSteps steps of a segment, for kTileChannels channels and kStates states.
//    Its threads stage B (or C) of a tile of kTileSteps steps in shared memory. A lane loads delta, u (or g) and z of its
//    channels itself, a group of steps at a time.
// 2. fold_parts_kernel composes the maps of a segment's parts in order. The decay of a part is the exponential of A times its
//    sum of step sizes, a double.
#pragma once

#include "common/activations.h"
#include "common/integers.h"
#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/segment_maps.h"
#include "selective_scan/cuda/states.cuh"

namespace ssm_kernels::selective_scan::segment_maps {

constexpr int kFoldThreads = 256;
// Threads that share the parts of a segment, if these are many.
constexpr int kFoldShares = 8, kFewParts = 32;

// A block's place.
struct Place {
  int64_t channel, batch, group, part, segment;  // channel: its first; part: among all
  int channels, state;
  int64_t begin, end;  // of its steps

  Place() = default;
  __device__ __forceinline__ explicit Place(const Params& p) {
    int64_t rest = blockIdx.x / p.tiles;
    const int64_t tile = blockIdx.x - rest * p.tiles;
    part = rest / p.state_tiles;
    state = static_cast<int>(rest - part * p.state_tiles) * kStates;
    rest = part / p.parts;
    const int64_t part_of_segment = part - rest * p.parts;
    batch = rest / p.launched_segments;
    segment = p.first_segment + rest - batch * p.launched_segments;
    group = tile / p.tiles_per_group;
    const int64_t in_group = (tile - group * p.tiles_per_group) * kTileChannels;
    channel = group * p.group_channels + in_group;
    channels = static_cast<int>(min(p.group_channels - in_group, int64_t(kTileChannels)));
    const int64_t first = segment * p.segment_steps;
    const int64_t segment_end = segment + 1 == p.segments ? p.seqlen : first + p.segment_steps;
    begin = min(first + part_of_segment * kPartSteps, segment_end);
    end = min(begin + kPartSteps, segment_end);
  }
};

// A lane's elements of a group of steps. Those of missing steps and channels are zero.
template <typename Scalar, int kSteps>
struct Group {
  Vector<Scalar, kSteps> of_channel[kLaneChannels];

  // `source` is the first step of the lane's first channel, of which `steps` and `channels` exist.
  __device__ __forceinline__ Group(const Scalar* source, const SequenceView& view, VectorAccess access, int steps,
                                   int channels) {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) of_channel[c] = Vector<Scalar, kSteps>::zero();
    if (access == VectorAccess::kAlongSteps && kSteps == kVectorSteps<Scalar> && steps == kSteps) {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        if (c < channels) of_channel[c] = Vector<Scalar, kSteps>::load(source + c * view.stride_dim);
      }
    } else if (access == VectorAccess::kAlongChannels) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s < steps && channels > 0) {
          const auto both = Vector<Scalar, kLaneChannels>::load(source);
#pragma unroll
          for (int c = 0; c < kLaneChannels; ++c) of_channel[c].set(s, both[c]);
        }
        source += view.stride_step;
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) {
          if (s < steps && c < channels) of_channel[c].set(s, source[c * view.stride_dim]);
        }
        source += view.stride_step;
      }
    }
  }
};

// A sum of step sizes in two floats: `low` sums the exact rounding errors of `high`. Conversions to double would be as slow as
// exponentials.
struct StepSum {
  float high = 0, low = 0;

  __device__ __forceinline__ void add(float size) {
    const float sum = high + size, added = sum - high;
    low += (high - (sum - added)) + (size - added);
    high = sum;
  }
  // The errors of a sum that is not finite are NaN.
  __device__ __forceinline__ double value() const {
    return isfinite(high) ? static_cast<double>(high) + static_cast<double>(low) : static_cast<double>(high);
  }
};

// Stages B or C of the steps [t0, t0 + steps) in shared memory; missing elements are zero.
template <typename Scalar>
__device__ __forceinline__ void stage(const Params& p, const Place& at, int64_t t0, int steps,
                                      float4 (&tile)[kTileSteps][kStates / 4]) {
  const Scalar* const source = static_cast<const Scalar*>(p.matrix.data) + at.batch * p.matrix.stride_batch +
                               at.group * p.matrix.stride_channel + at.state * p.matrix.stride_state +
                               t0 * p.matrix.stride_step;
  const bool along_steps = are_steps_closer(p.matrix.stride_step, p.matrix.stride_state);
#pragma unroll
  for (int i = 0; i < kTileSteps * kStates / kThreads; ++i) {
    const int element = static_cast<int>(threadIdx.x) + i * kThreads;
    const int step = along_steps ? element % kTileSteps : element / kStates;
    const int state = along_steps ? element / kTileSteps : element % kStates;
    const bool exists = step < steps && at.state + state < p.dstate;
    reinterpret_cast<float*>(tile[step])[state] =
        exists ? to_accumulate(source[step * p.matrix.stride_step + state * p.matrix.stride_state]) : 0.0f;
  }
}

template <typename Scalar, bool is_adjoint, int kSteps>
__global__ void __launch_bounds__(kThreads, kBlocks) segment_maps_kernel(const __grid_constant__ Params p) {
  __shared__ float4 matrices[kTileSteps][kStates / 4];
  __shared__ Place shared_place;  // read on use, so that it occupies no registers
  if (threadIdx.x == 0) shared_place = Place(p);
  __syncthreads();
  const Place& at = shared_place;
  const int first_channel = static_cast<int>(threadIdx.x) * kLaneChannels;
  const int channels = max(0, min(at.channels - first_channel, kLaneChannels));  // of the lane
  float A[kLaneChannels][kStates], h[kLaneChannels][kStates] = {};               // A in units of ln 2
  float bias[kLaneChannels];
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) {
    const int64_t channel = at.channel + first_channel + c;
    const bool has_bias = c < channels && p.delta_bias.data != nullptr;
    bias[c] = has_bias ? static_cast<const float*>(p.delta_bias.data)[channel * p.delta_bias.stride] : 0.0f;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      const bool exists = c < channels && at.state + n < p.dstate;
      A[c][n] = exists ? load_state<float>(p.A, 0, channel, at.state + n) * float(kLog2E) : 0.0f;
    }
  }
  StepSum sums[kLaneChannels];

  const int tiles = static_cast<int>((at.end - at.begin + kTileSteps - 1) / kTileSteps);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int64_t t0 = at.begin + (is_adjoint ? tiles - 1 - tile : tile) * kTileSteps;
    const int tile_steps = static_cast<int>(min(at.end - t0, int64_t(kTileSteps)));
    __syncthreads();
    stage<Scalar>(p, at, t0, tile_steps, matrices);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kTileSteps; i += kSteps) {
      const int first = is_adjoint ? kTileSteps - kSteps - i : i, steps = min(tile_steps - first, kSteps);
      if (steps <= 0) continue;
      const auto load = [&](const SequenceView& view, VectorAccess access) {
        const Scalar* const source = static_cast<const Scalar*>(view.data) + at.batch * view.stride_batch +
                                     (at.channel + first_channel) * view.stride_dim + (t0 + first) * view.stride_step;
        return Group<Scalar, kSteps>(source, view, access, steps, view.data == nullptr ? 0 : channels);
      };
      const Group<Scalar, kSteps> deltas = load(p.delta, p.delta_access), inputs = load(p.input, p.input_access);
      // Forward reads no gates, and the compiler drops this second load of its inputs.
      [[maybe_unused]] const Group<Scalar, kSteps> gates =
          load(is_adjoint ? p.z : p.input, is_adjoint ? p.z_access : p.input_access);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int s = is_adjoint ? kSteps - 1 - j : j;
        if (s >= steps) continue;
        float sizes[kLaneChannels], weighted[kLaneChannels];
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) {
          const float biased = deltas.of_channel[c].accumulate(s) + bias[c];
          sizes[c] = p.delta_softplus ? softplus(biased) : biased;
          sums[c].add(sizes[c]);
          weighted[c] = inputs.of_channel[c].accumulate(s);
          if constexpr (is_adjoint) {
            if (p.z.data != nullptr) weighted[c] *= silu(gates.of_channel[c].accumulate(s));
          } else {
            weighted[c] *= sizes[c];
          }
        }
#pragma unroll
        for (int quarter = 0; quarter < kStates / 4; ++quarter) {
          const float4 four = matrices[first + s][quarter];
          const float matrix[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int n = quarter * 4 + k;
#pragma unroll
            for (int c = 0; c < kLaneChannels; ++c) {
              const float decay = Math<float>::exp2(sizes[c] * A[c][n]);
              h[c][n] = is_adjoint ? decay * Math<float>::fma(matrix[k], weighted[c], h[c][n])
                                   : Math<float>::fma(decay, h[c][n], weighted[c] * matrix[k]);
            }
          }
        }
      }
    }
  }

  const bool is_whole = p.parts == 1;
  const int64_t row = is_whole ? at.batch * p.segments + at.segment : at.part;
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) {
    if (c >= channels) continue;
    const int64_t channel = at.channel + first_channel + c, of_channel = row * p.dim + channel;
    float* const offset = is_whole ? static_cast<float*>(p.offset) + of_channel * p.channel_stride
                                   : static_cast<float*>(p.part_offset) + of_channel * p.dstate;
    float* const decay =
        is_whole && p.decay != nullptr ? static_cast<float*>(p.decay) + of_channel * p.channel_stride : nullptr;
    const double sum = sums[c].value();
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      const int state = at.state + n;
      if (state >= p.dstate) continue;
      offset[state] = h[c][n];
      if (decay != nullptr) {
        decay[state] = static_cast<float>(exp(static_cast<double>(load_state<float>(p.A, 0, channel, state)) * sum));
      }
    }
    if (!is_whole && at.state == 0) static_cast<double*>(p.part_sum)[of_channel] = sum;
  }
}

// Consecutive parts: the state after them from zero, and their sum of step sizes.
struct PartsMap {
  float state = 0;
  double sum = 0;

  __device__ __forceinline__ void append(float A, const PartsMap& next) {
    state = cuda::AffineMap<float>{Math<float>::exp(static_cast<float>(A * next.sum)), next.state}(state);
    sum += next.sum;
  }
};

template <bool is_adjoint, int share_count>
__global__ void __launch_bounds__(kFoldThreads) fold_parts_kernel(const __grid_constant__ Params p) {
  constexpr int kAtOnce = 8;  // parts whose maps a thread loads before it folds them
  constexpr int kFoldStates = kFoldThreads / share_count;
  __shared__ PartsMap shares[share_count][kFoldStates];
  const int64_t states = p.dim * p.dstate, blocks = (states + kFoldStates - 1) / kFoldStates;
  const int64_t launched = blockIdx.x / blocks;  // row and segment
  const int lane = static_cast<int>(threadIdx.x) % kFoldStates, share = static_cast<int>(threadIdx.x) / kFoldStates;
  const int64_t of_row = (blockIdx.x - launched * blocks) * kFoldStates + lane, channel = of_row / p.dstate;
  const bool exists = of_row < states;
  const float A = exists ? load_state<float>(p.A, 0, channel, static_cast<int>(of_row - channel * p.dstate)) : 0.0f;
  const int64_t end = p.parts * (share + 1) / share_count;
  PartsMap total;
#pragma unroll 1
  for (int64_t first = p.parts * share / share_count; first < end; first += kAtOnce) {
    PartsMap loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!exists || first + i >= end) continue;
      const int64_t part = launched * p.parts + (is_adjoint ? p.parts - 1 - first - i : first + i);
      loaded[i] = {static_cast<const float*>(p.part_offset)[part * states + of_row],
                   static_cast<const double*>(p.part_sum)[part * p.dim + channel]};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < end) total.append(A, loaded[i]);
    }
  }
  shares[share][lane] = total;
  __syncthreads();
  if (share != 0 || !exists) return;
#pragma unroll 1
  for (int i = 1; i < share_count; ++i) total.append(A, shares[i][lane]);
  const int64_t batch = launched / p.launched_segments, segment = p.first_segment + launched - batch * p.launched_segments;
  const int64_t to = ((batch * p.segments + segment) * p.dim + channel) * p.channel_stride + (of_row - channel * p.dstate);
  static_cast<float*>(p.offset)[to] = total.state;
  if (p.decay != nullptr) static_cast<float*>(p.decay)[to] = static_cast<float>(exp(A * total.sum));
}

template <typename Scalar>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  const auto run = [&](auto adjoint) {
    constexpr bool kIsAdjoint = decltype(adjoint)::value;
    const bool has_vectors = p.delta_access == VectorAccess::kAlongSteps;
    auto* const kernel = has_vectors ? segment_maps_kernel<Scalar, kIsAdjoint, kVectorSteps<Scalar>>
                                     : segment_maps_kernel<Scalar, kIsAdjoint, kFewSteps>;
    const cudaError_t error = cuda::launch(kernel, p.blocks(), kThreads, 0, stream, /*uses_pdl=*/false, p);
    if (error != cudaSuccess || p.parts == 1) return error;
    const auto fold = [&](auto shares) {
      constexpr int kShares = decltype(shares)::value;
      const int64_t blocks = p.batch * p.launched_segments * ceil_div(p.dim * p.dstate, int64_t(kFoldThreads / kShares));
      return cuda::launch(fold_parts_kernel<kIsAdjoint, kShares>, blocks, kFoldThreads, 0, stream, /*uses_pdl=*/false, p);
    };
    return p.parts > kFewParts ? fold(std::integral_constant<int, kFoldShares>()) : fold(std::integral_constant<int, 1>());
  };
  return p.is_adjoint ? run(std::true_type()) : run(std::false_type());
}

}  // namespace ssm_kernels::selective_scan::segment_maps
