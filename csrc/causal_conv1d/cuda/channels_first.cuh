// Forward and backward of the causal convolution for channels-first tensors, whose steps are contiguous. causal_conv1d.h and
// channels_last_bwd.cuh have the formulas. Each batch row is one sequence.
//
// A warp takes a tile of time of one channel, or several rows of few steps, each by as many lanes as have steps. Per iteration
// each lane takes a vector of 16 bytes of neighboring steps. Forward advances in time, backward goes back. A lane gets the
// kHalo inputs before its vector from the lane below by shuffles, and in backward the kHalo g after its vector from the lane
// above. The lanes at the warp's ends exchange theirs with the previous or next iteration. Backward adds the lanes' sums for
// grad_weight and grad_bias by shuffles, in a fixed order, and writes a row of partial sums per tile to the workspace.
#pragma once

#include "causal_conv1d/cuda/states.cuh"
#include "causal_conv1d/cuda/taps.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/pdl.cuh"

namespace ssm_kernels::causal_conv1d {

// A lane's tile: steps [begin, end) of channel c of entry b. The lanes that share it are neighbors.
struct ChannelsFirstSegment {
  int64_t b, c, tile, begin, end;
  int lanes, lane;  // that share the tile; the lane's place among them
  int place;        // of the tile among those of the warp
  bool exists;      // otherwise the lane repeats the last tile and stores nothing

  // Returns false if no lane of the warp has a tile. choose_kernels limits the number of tiles to 32 bits.
  __device__ __forceinline__ bool find(const ConvParams& p, const Tiling& tiling) {
    const int warp_lane = threadIdx.x % kWarpSize, log_tiles = kLogWarpSize - tiling.log_row_lanes;
    lanes = 1 << tiling.log_row_lanes;
    lane = warp_lane & (lanes - 1);
    const unsigned tiles = tiling.tiles_divisor.value<unsigned>(), channels = tiling.channels_divisor.value<unsigned>();
    const unsigned count = static_cast<unsigned>(p.batch) * channels * tiles;
    const unsigned first = (blockIdx.x * kWarps + threadIdx.x / kWarpSize) << log_tiles;
    if (first >= count) return false;
    place = warp_lane >> tiling.log_row_lanes;
    const unsigned wanted = first + place;
    exists = wanted < count;
    const unsigned index = exists ? wanted : count - 1;
    const unsigned row = tiling.tiles_divisor.divide(index), batch = tiling.channels_divisor.divide(row);
    tile = index - row * tiles;
    b = batch;
    c = row - batch * channels;
    begin = tile * tiling.steps;
    end = begin + tiling.steps < p.seqlen ? begin + tiling.steps : p.seqlen;
    return true;
  }
};

// The last kHalo elements of a lane's vector, as 32-bit words for shuffles.
template <typename Scalar>
struct VectorTail {
  static constexpr int kElements = sizeof(Scalar) == 2 ? 4 : kHalo;  // whole words
  static constexpr int kWords = kElements * static_cast<int>(sizeof(Scalar)) / 4;
  uint32_t words[kWords];

  template <int size>
  __device__ __forceinline__ static VectorTail of(const cuda::Vector<Scalar, size>& vector) {
    VectorTail tail;
    memcpy(tail.words, reinterpret_cast<const char*>(vector.accesses) + (size - kElements) * sizeof(Scalar),
           sizeof(tail.words));
    return tail;
  }
  // Loads the kHalo steps before a tile's first: from the tile before, or from the initial state.
  __device__ __forceinline__ static VectorTail load(const ConvParams& p, const ChannelsFirstSegment& segment, const Scalar* x) {
    Scalar elements[kElements];
#pragma unroll
    for (int lag = 1; lag <= kElements; ++lag) {
      elements[kElements - lag] = from_accumulate<Scalar>(AccumulateType<Scalar>(0));
      if (lag < p.width) {
        elements[kElements - lag] =
            segment.begin > 0 ? x[segment.begin - lag] : load_initial_of_row<Scalar>(p, segment.b, segment.c, lag);
      }
    }
    VectorTail tail;
    memcpy(tail.words, elements, sizeof(tail.words));
    return tail;
  }
  // As load(), by one access to the vector before an aligned tile. No conversion waits for it.
  template <int size>
  __device__ __forceinline__ static VectorTail load_vector(const ConvParams& p, const ChannelsFirstSegment& segment,
                                                           const Scalar* x) {
    if (segment.begin > 0) return of(cuda::Vector<Scalar, size>::load_once(x + segment.begin - size));
    if (p.initial_state.data != nullptr) return load(p, segment, x);
    return VectorTail{};
  }
  // Gives each lane the tail of the lane below, and the first lane that of the last in `earlier`, the vectors before those of
  // all lanes.
  __device__ __forceinline__ void to_lane_above(const ChannelsFirstSegment& segment, const VectorTail& earlier,
                                                AccumulateType<Scalar>* before) const {
    VectorTail received;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t sent = segment.lane == segment.lanes - 1 ? earlier.words[i] : words[i];
      received.words[i] = __shfl_sync(cuda::kAllLanes, sent, segment.lane - 1, segment.lanes);
    }
    Scalar elements[kElements];
    memcpy(elements, received.words, sizeof(elements));
#pragma unroll
    for (int i = 0; i < kHalo; ++i) before[i] = to_accumulate(elements[kElements - kHalo + i]);
  }
};

// The gradient of the channel's final state, which is its last width - 1 steps, or null.
template <typename Scalar>
__device__ __forceinline__ const Scalar* grad_final_state_of(const ConvBwdParams& p, const ChannelsFirstSegment& segment) {
  if (p.grad_final_state.data == nullptr) return nullptr;
  return static_cast<const Scalar*>(p.grad_final_state.data) + p.grad_final_state.offset(segment.b, segment.c, 0);
}

// Loads g at the kHalo steps after a tile, zero after the sequence.
template <typename Scalar, typename Acc>
__device__ __forceinline__ void load_gradients_after(const ConvBwdParams& p, const ChannelsFirstSegment& segment,
                                                     const Taps<Scalar, 1>& taps, int width, const Scalar* x,
                                                     const Scalar* grad_out, Acc (&later)[kHalo]) {
#pragma unroll
  for (int i = 0; i < kHalo; ++i) {
    const int64_t t = segment.end + i;
    later[i] = 0;
    if (t >= p.seqlen) continue;
    later[i] = to_accumulate(grad_out[t]);
    if (!p.has_silu) continue;
    Acc inputs[kHalo + 1];
#pragma unroll
    for (int lag = 0; lag <= kHalo; ++lag) inputs[kHalo - lag] = to_accumulate(x[t - lag]);
    later[i] *= silu_derivative(taps.convolve(width, 0, [&](int lag) { return inputs[kHalo - lag]; }));
  }
}

// Writes a tile's sums for grad_weight and grad_bias as a row of partial sums.
template <typename Acc>
__device__ __forceinline__ void store_tile_sums(const ConvBwdParams& p, const Tiling& tiling,
                                                const ChannelsFirstSegment& segment, int width,
                                                const Acc (&grad_weight)[kMaxVectorWidth], Acc grad_bias, Acc* sums) {
  const auto sum_over_tile = [&](Acc value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      if (distance < segment.lanes) value += __shfl_xor_sync(cuda::kAllLanes, value, distance);
    }
    return value;
  };
  const bool stores = segment.lane == 0 && segment.exists;
  Acc* const target = sums + (segment.b * tiling.tiles + segment.tile) * (p.width + 1) * p.channels + segment.c;
#pragma unroll
  for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
    const Acc sum = sum_over_tile(grad_weight[lag]);
    if (stores && lag < width) target[lag * p.channels] = sum;
  }
  const Acc sum = sum_over_tile(grad_bias);
  if (stores) target[p.width * p.channels] = sum;
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps, 10)
    conv_fwd_channels_first_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  using Tail = VectorTail<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar), kAhead = 4;
  static_assert(kVector >= Tail::kElements, "the halo of a lane lies in one other lane");
  using Inputs = cuda::Vector<Scalar, kVector>;
  ChannelsFirstSegment segment;
  if (!segment.find(p, tiling)) return;
  const int lane = segment.lane, warp_steps = kVector * segment.lanes;
  const int width = static_cast<int>(p.width);
  const Taps<Scalar, 1> taps(p, width, segment.c);
  const Scalar* x = static_cast<const Scalar*>(p.x.data) + p.x.offset(segment.b, 0, segment.c);
  Scalar* out = static_cast<Scalar*>(p.out.data) + p.out.offset(segment.b, 0, segment.c);
  Tail earlier = Tail::template load_vector<kVector>(p, segment, x);

  // Steps are counted from the tile's first one, in 32 bits. Lanes without a row take part in its only iteration.
  const int count = segment.exists ? static_cast<int>(segment.end - segment.begin) : 0;
  x += segment.begin;
  out += segment.begin;
  int begin = 0;
  do {
    Inputs loaded[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int t = begin + j * warp_steps + lane * kVector;
      loaded[j] = t < count ? Inputs::load_once(x + t) : Inputs::zero();
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      // No lane has steps left.
      if (j > 0 && begin + j * warp_steps >= count) break;
      const int t = begin + j * warp_steps + lane * kVector;
      Acc inputs[kHalo + kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) inputs[kHalo + i] = loaded[j].accumulate(i);
      const Tail tail = Tail::of(loaded[j]);
      tail.to_lane_above(segment, earlier, inputs);
      earlier = tail;
      if (t >= count) continue;
      Acc outputs[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) outputs[i] = taps.convolve(width, 0, [&](int lag) { return inputs[kHalo + i - lag]; });
      if (p.has_silu) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) outputs[i] = silu(outputs[i]);
      }
      Inputs::round(outputs).store_once(out + t);
    }
    begin += kAhead * warp_steps;
  } while (begin < count);
  if (p.final_state.data != nullptr && segment.end == p.seqlen && lane == 0 && count > 0) {
    store_final_state_of_row<Scalar>(p, segment.b, segment.c);
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    conv_bwd_channels_first_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  cuda::launch_dependents();
  using Tail = VectorTail<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar);
  using Inputs = cuda::Vector<Scalar, kVector>;
  // Pipeline stages of a vector of x and of grad_out per lane: one in use, the others being copied.
  constexpr int kStages = 4;
  __shared__ Inputs stages[kStages][2][kWarpSize * kWarps];
  ChannelsFirstSegment segment;
  if (!segment.find(p, tiling)) return;
  const int lane = segment.lane, warp_steps = kVector * segment.lanes;
  const int width = static_cast<int>(p.width);
  const Taps<Scalar, 1> taps(p, width, segment.c);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(segment.b, 0, segment.c);
  const Scalar* const grad_out = static_cast<const Scalar*>(p.grad_out.data) + p.grad_out.offset(segment.b, 0, segment.c);
  Scalar* const grad_x = static_cast<Scalar*>(p.grad_x.data) + p.grad_x.offset(segment.b, 0, segment.c);

  const Scalar* const grad_final = grad_final_state_of<Scalar>(p, segment);

  Acc grad_weight[kMaxVectorWidth] = {}, grad_bias = 0;
  const int64_t begin = segment.begin + lane * kVector;
  int64_t t = begin + ((segment.end - segment.begin - 1) & -int64_t(warp_steps));
  const auto start_copies = [&](int64_t t, int stage) {
    if (begin <= t && t < segment.end) {
      cuda::cp_async<kVectorBytes>(&stages[stage][0][threadIdx.x], x + t);
      cuda::cp_async<kVectorBytes>(&stages[stage][1][threadIdx.x], grad_out + t);
    }
    cuda::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) start_copies(t - i * warp_steps, i);
  // Lane 0: g at the kHalo steps after the warp's vectors, zero after the sequence.
  Acc later[kHalo];
  load_gradients_after(p, segment, taps, width, x, grad_out, later);
  const Tail first = Tail::template load_vector<kVector>(p, segment, x);
#pragma unroll 1
  for (int stage = 0; t >= begin; t -= warp_steps, stage = (stage + 1) % kStages) {
    start_copies(t - (kStages - 1) * warp_steps, (stage + kStages - 1) % kStages);
    // Waits for this iteration and the next, in which lane 31 has the inputs before lane 0's.
    cuda::cp_async_wait<kStages - 2>();
    const bool has_steps = t < segment.end;
    const Inputs loaded = has_steps ? stages[stage][0][threadIdx.x] : Inputs::zero();
    const Inputs grads = has_steps ? stages[stage][1][threadIdx.x] : Inputs::zero();
    Acc inputs[kHalo + kVector], g[kVector + kHalo];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      inputs[kHalo + i] = loaded.accumulate(i);
      g[i] = grads.accumulate(i);
    }
    const Tail earlier = t > begin ? Tail::of(stages[(stage + 1) % kStages][0][threadIdx.x]) : first;
    Tail::of(loaded).to_lane_above(segment, earlier, inputs);
    if (p.has_silu) {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        g[i] *= silu_derivative(taps.convolve(width, 0, [&](int lag) { return inputs[kHalo + i - lag]; }));
    }
    if (!has_steps) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) g[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kHalo; ++i) {
      const Acc sent = lane == 0 ? later[i] : g[i];
      g[kVector + i] = __shfl_sync(cuda::kAllLanes, sent, segment.lane + 1, segment.lanes);
      later[i] = g[i];
    }
    if (!has_steps) continue;

    Acc grad_inputs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      grad_inputs[i] = taps.correlate(width, 0, [&](int lag) { return g[i + lag]; });
#pragma unroll
      for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
        grad_weight[lag] = Math<Acc>::fma(g[i], inputs[kHalo + i - lag], grad_weight[lag]);
      }
      grad_bias += g[i];
    }
    if (grad_final != nullptr && t + kVector + kHalo > p.seqlen) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int64_t index = t + i - (p.seqlen - (p.width - 1));
        if (index >= 0) grad_inputs[i] += to_accumulate(grad_final[index * p.grad_final_state.stride_step]);
      }
    }
    if (p.grad_x.data != nullptr && segment.exists) Inputs::round(grad_inputs).store_once(grad_x + t);
  }

  if (sums != nullptr) store_tile_sums(p, tiling, segment, width, grad_weight, grad_bias, sums);
}

}  // namespace ssm_kernels::causal_conv1d
