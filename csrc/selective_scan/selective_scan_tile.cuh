// What forward and backward share on the device: a block's place in the work, tiles in shared memory, scans over a warp's
// lanes.
//
// A tile of a (batch, dim, seqlen) tensor lies in shared memory in the order in which it was read: steps of a channel beside
// each other, or channels of a step. A lane reads and writes its consecutive steps in either. Steps and channels past the end
// are zeros. A tile of B or C is widened to the accumulation type, steps of a state beside each other. Where each lane's steps
// begin, a gap of kVectorBytes is left, so that the lanes' vectors lie in different banks.
#pragma once

#include <type_traits>

#include "common/activations.h"
#include "common/discretization.h"
#include "cuda/async_copy.cuh"
#include "cuda/vector_io.cuh"
#include "selective_scan/selective_scan_cuda.h"

namespace ssm_kernels::selective_scan {

using cuda::AccumulateType;
using cuda::from_accumulate;
using cuda::to_accumulate;
using cuda::Vector;

constexpr unsigned int kAllLanes = 0xffffffffu;
static_assert(kVectorBytes == cuda::kAsyncCopyBytes, "tiles are filled by asynchronous copies of one vector");

template <typename T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

// The same value, but the compiler does not know. What a thread moves of a tile has the same place in all tiles, and its
// addresses would be kept in registers through the loop over states, which has none to spare.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ int64_t opaque(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// Extent of a tile, and what of it lies inside the tensor.
template <int steps_per_lane>
struct TileShape {
  static constexpr int kLog2Steps = steps_per_lane == 16 ? 4 : 3;
  static_assert(1 << kLog2Steps == steps_per_lane, "a lane takes 8 or 16 steps");

  int log2_channels, log2_steps;
  int channels = 0, steps = 0;

  SSM_HOST_DEVICE TileShape(int log2_warps, int log2_time_lanes)
      : log2_channels(5 + log2_warps - log2_time_lanes), log2_steps(log2_time_lanes + kLog2Steps) {
    static_assert(1 << 5 == kWarpSize, "");
  }
  SSM_HOST_DEVICE int max_channels() const { return 1 << log2_channels; }
  SSM_HOST_DEVICE int max_steps() const { return 1 << log2_steps; }
};

// A block's batch entry, channels and steps.
struct Position {
  int64_t batch, segment, tile;
  int64_t first_channel;
  int channels;  // may be 0
  int64_t begin, end;

  __device__ __forceinline__ Position(const SelectiveScanParams& p, const ScanPlan& plan, int64_t block) {
    const int64_t row = block / plan.tiles;
    tile = block - row * plan.tiles;
    batch = row / plan.segments;
    segment = row - batch * plan.segments;
    const int64_t span = tile / plan.tiles_per_span;
    const int64_t in_span = (tile - span * plan.tiles_per_span) * plan.channels();
    first_channel = span * plan.span + in_span;
    channels = in_span >= plan.span ? 0 : static_cast<int>(min(plan.span - in_span, int64_t(plan.channels())));
    begin = segment * plan.segment_steps;
    end = segment + 1 == plan.segments ? p.seqlen : begin + plan.segment_steps;
  }
};

template <typename Scalar, int steps_per_lane>
struct Tile {
  Scalar* data;
  int channel_stride, step_stride, gap;

  static SSM_HOST_DEVICE int capacity(const TileShape<steps_per_lane>& shape) {
    const int along_steps = shape.max_channels() * (shape.max_steps() + kVectorSize<Scalar>);
    const int along_channels =
        shape.max_steps() * shape.max_channels() + shape.max_steps() / steps_per_lane * kVectorSize<Scalar>;
    const int larger = along_steps > along_channels ? along_steps : along_channels;
    return (larger + kVectorSize<Scalar> - 1) / kVectorSize<Scalar> * kVectorSize<Scalar>;
  }

  __device__ __forceinline__ Tile(Scalar* memory, Access access, const TileShape<steps_per_lane>& shape) : data(memory) {
    const bool along_channels = access == Access::kAlongChannels;
    channel_stride = along_channels ? 1 : shape.max_steps() + kVectorSize<Scalar>;
    step_stride = along_channels ? shape.max_channels() : 1;
    gap = along_channels ? kVectorSize<Scalar> : 0;
  }

  __device__ __forceinline__ Scalar* at(int channel, int step) const {
    return data + channel * channel_stride + step * step_stride + step / steps_per_lane * gap;
  }

  __device__ __forceinline__ void read(int channel, int first_step, AccumulateType<Scalar> (&values)[steps_per_lane]) const {
    const Scalar* const source = at(channel, opaque(first_step));
    if (step_stride == 1) {
      const auto vector = Vector<Scalar, steps_per_lane>::load(source);
#pragma unroll
      for (int j = 0; j < steps_per_lane; ++j) values[j] = to_accumulate(vector[j]);
    } else {
#pragma unroll
      for (int j = 0; j < steps_per_lane; ++j) values[j] = to_accumulate(source[j * step_stride]);
    }
  }

  __device__ __forceinline__ void write(int channel, int first_step,
                                        const AccumulateType<Scalar> (&values)[steps_per_lane]) const {
    Scalar* const target = at(channel, opaque(first_step));
    if (step_stride == 1) {
      Vector<Scalar, steps_per_lane> vector;
#pragma unroll
      for (int j = 0; j < steps_per_lane; ++j) vector.set(j, from_accumulate<Scalar>(values[j]));
      vector.store(target);
    } else {
#pragma unroll
      for (int j = 0; j < steps_per_lane; ++j) target[j * step_stride] = from_accumulate<Scalar>(values[j]);
    }
  }

  // visit(channel, step, count, offset in the tensor) for each piece of `count` elements, neighbors along steps or channels.
  template <typename Visitor>
  static __device__ __forceinline__ void for_each_piece(Access access, const SequenceView& view,
                                                        const TileShape<steps_per_lane>& shape, const Visitor& visit) {
    constexpr int kLog2Vector = kVectorSize<Scalar> == 8 ? 3 : kVectorSize<Scalar> == 4 ? 2 : 1;
    static_assert(1 << kLog2Vector == kVectorSize<Scalar>, "an element is 2, 4 or 8 bytes");
    const int elements = 1 << (shape.log2_channels + shape.log2_steps);
    if (access == Access::kSingly) {
      const bool steps_are_closer = view.stride_step <= view.stride_dim;
      for (int i = opaque(static_cast<int>(threadIdx.x)); i < elements; i += blockDim.x) {
        const int channel = steps_are_closer ? i >> shape.log2_steps : i & (shape.max_channels() - 1);
        const int step = steps_are_closer ? i & (shape.max_steps() - 1) : i >> shape.log2_channels;
        visit(channel, step, channel < shape.channels && step < shape.steps ? 1 : 0,
              channel * view.stride_dim + step * view.stride_step);
      }
      return;
    }
    const bool along_steps = access == Access::kAlongSteps;
    const int log2_pieces = (along_steps ? shape.log2_steps : shape.log2_channels) - kLog2Vector;
    for (int i = opaque(static_cast<int>(threadIdx.x)); i < elements >> kLog2Vector; i += blockDim.x) {
      const int row = i >> log2_pieces, first = (i & ((1 << log2_pieces) - 1)) << kLog2Vector;
      const int channel = along_steps ? row : first, step = along_steps ? first : row;
      int count = min(kVectorSize<Scalar>, along_steps ? shape.steps - step : shape.channels - channel);
      if (count < 0 || (along_steps ? channel >= shape.channels : step >= shape.steps)) count = 0;
      visit(channel, step, count, channel * view.stride_dim + step * view.stride_step);
    }
  }

  // By the whole block; source is the tile's first element. The copies may still be under way when it returns.
  __device__ __forceinline__ void load(Access access, const SequenceView& view, const Scalar* source,
                                       const TileShape<steps_per_lane>& shape) const {
    for_each_piece(access, view, shape, [&](int channel, int step, int count, int64_t offset) {
      if (access == Access::kSingly) {
        *at(channel, step) = count ? source[offset] : from_accumulate<Scalar>(0);
      } else {
        cuda::async_copy(at(channel, step), source + (count ? offset : 0), count * static_cast<int>(sizeof(Scalar)));
      }
    });
  }

  __device__ __forceinline__ void store(Access access, const SequenceView& view, Scalar* target,
                                        const TileShape<steps_per_lane>& shape) const {
    for_each_piece(access, view, shape, [&](int channel, int step, int count, int64_t offset) {
      if (access != Access::kSingly && count == kVectorSize<Scalar>) {
        Vector<Scalar, kVectorSize<Scalar>>::load(at(channel, step)).store_once(target + offset);
      } else {
        const Scalar* const source = at(channel, step);
        for (int i = 0; i < count; ++i) target[offset + i] = source[i];
      }
    });
  }
};

template <typename Scalar>
__device__ __forceinline__ Scalar* first_element(const SequenceView& view, const Position& at, int64_t first_step) {
  return static_cast<Scalar*>(view.data) + opaque(at.batch) * view.stride_batch + opaque(at.first_channel) * view.stride_dim +
         first_step * view.stride_step;
}

// A slice of B or C: some states of a tile's steps.
template <typename Scalar, int steps_per_lane>
struct MatrixSlice {
  using Acc = AccumulateType<Scalar>;
  static constexpr int kLanePitch = steps_per_lane + kVectorSize<Acc>;

  Acc* data;
  int pitch;

  static SSM_HOST_DEVICE int pitch_of(const TileShape<steps_per_lane>& shape) {
    return shape.max_steps() / steps_per_lane * kLanePitch;
  }

  __device__ __forceinline__ const Acc* lane(int state, int time_lane) const {
    return data + state * pitch + time_lane * kLanePitch;
  }

  // By the whole block; source is the first state's value at the tile's first step.
  __device__ __forceinline__ void stage(Access access, const MatrixView& view, const Scalar* source, int states, int log2_slice,
                                        const TileShape<steps_per_lane>& shape) const {
    constexpr int kSize = kVectorSize<Scalar>;
    constexpr int kLog2Size = kSize == 8 ? 3 : kSize == 4 ? 2 : 1;
    const auto at = [&](int state, int step) { return data + state * pitch + step + step / steps_per_lane * kVectorSize<Acc>; };
    if (access == Access::kAlongSteps) {
      const int log2_pieces = shape.log2_steps - kLog2Size;
      for (int i = opaque(static_cast<int>(threadIdx.x)); i < states << log2_pieces; i += blockDim.x) {
        const int state = i >> log2_pieces, step = (i & ((1 << log2_pieces) - 1)) << kLog2Size;
        const Scalar* const piece = source + state * view.stride_state + step;
        auto vector = Vector<Scalar, kSize>::zero();
        if (step + kSize <= shape.steps) {
          vector = Vector<Scalar, kSize>::load(piece);
        } else {
          for (int j = 0; j < kSize; ++j) {
            if (step + j < shape.steps) vector.set(j, piece[j]);
          }
        }
        Vector<Acc, kSize> wide;
#pragma unroll
        for (int j = 0; j < kSize; ++j) wide.set(j, to_accumulate(vector[j]));
        wide.store(at(state, step));
      }
    } else if (access == Access::kAlongChannels) {
      const int log2_pieces = log2_slice > kLog2Size ? log2_slice - kLog2Size : 0;
      for (int i = opaque(static_cast<int>(threadIdx.x)); i < shape.max_steps() << log2_pieces; i += blockDim.x) {
        const int step = i >> log2_pieces, state = (i & ((1 << log2_pieces) - 1)) << kLog2Size;
        if (state >= states) continue;
        auto vector = Vector<Scalar, kSize>::zero();
        if (step < shape.steps) vector = Vector<Scalar, kSize>::load(source + state + step * view.stride_step);
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (state + j < states) *at(state + j, step) = to_accumulate(vector[j]);
        }
      }
    } else {
      const bool steps_are_closer = view.stride_step <= view.stride_state;
      for (int i = opaque(static_cast<int>(threadIdx.x)); i < 1 << (shape.log2_steps + log2_slice); i += blockDim.x) {
        const int state = steps_are_closer ? i >> shape.log2_steps : i & ((1 << log2_slice) - 1);
        const int step = steps_are_closer ? i & (shape.max_steps() - 1) : i >> log2_slice;
        if (state >= states) continue;
        *at(state, step) =
            step < shape.steps ? to_accumulate(source[state * view.stride_state + step * view.stride_step]) : Acc(0);
      }
    }
  }
};

// The value of a constant matrix for one channel and state, or where the matrix has a row per step, that row at the block's
// place.
template <typename Scalar>
__device__ __forceinline__ const Scalar* matrix_row(const MatrixView& view, const SelectiveScanParams& p, const Position& at,
                                                    int first_state, int64_t first_step) {
  const int64_t group = view.groups == 1 ? 0 : opaque(at.first_channel) / (p.dim / view.groups);
  return static_cast<const Scalar*>(view.data) + opaque(at.batch) * view.stride_batch + group * view.stride_channel +
         first_state * view.stride_state + first_step * view.stride_step;
}

template <typename Acc>
__device__ __forceinline__ Acc constant_value(const MatrixView& view, int64_t channel, int state) {
  return static_cast<const Acc*>(view.data)[channel * view.stride_channel + state * view.stride_state];
}

// What A is multiplied by once so that z = delta A enters the exponential without another multiplication.
template <typename Method, typename Acc>
constexpr Acc kScaleOfA = Method::kExponential ? Acc(kLog2E) : Acc(1);

// z and the method's basis for a scaled A.
template <typename Method, typename Acc>
struct Transition {
  Acc z, basis;

  __device__ __forceinline__ Transition(Acc delta, Acc scaled_A) {
    if constexpr (Method::kExponential) {
      const Acc exponent = delta * scaled_A;
      basis = Math<Acc>::exp2(exponent);
      z = exponent * Acc(kLn2);
    } else {
      z = delta * scaled_A;
      basis = Method::basis(z);
    }
  }
  __device__ __forceinline__ Transition(Acc delta, Acc scaled_A, Acc known_basis) : z(delta * scaled_A), basis(known_basis) {
    if constexpr (Method::kExponential) z *= Acc(kLn2);
  }
  __device__ __forceinline__ Acc abar() const { return Method::abar(z, basis); }
  // delta u k(z), given delta u.
  __device__ __forceinline__ Acc input(Acc delta_u) const {
    return Method::kUnitGain ? delta_u : delta_u * Method::gain(z, basis);
  }
};

template <typename Acc>
__device__ __forceinline__ Acc shuffle_earlier(Acc value, int lanes) {
  return __shfl_up_sync(kAllLanes, value, lanes);
}
template <typename Acc>
__device__ __forceinline__ Acc shuffle_later(Acc value, int lanes) {
  return __shfl_down_sync(kAllLanes, value, lanes);
}

// A thread's place in its block: the lane of a warp is time * channels_per_warp + the channel in the warp.
struct Lane {
  int time, log2_time_lanes, channels_per_warp, channel_in_warp, channel;

  __device__ __forceinline__ explicit Lane(int log2_time_lanes)
      : log2_time_lanes(log2_time_lanes), channels_per_warp(kWarpSize >> log2_time_lanes) {
    const int lane = threadIdx.x % kWarpSize;
    time = lane / channels_per_warp;
    channel_in_warp = lane % channels_per_warp;
    channel = threadIdx.x / kWarpSize * channels_per_warp + channel_in_warp;
  }
  __device__ __forceinline__ bool is_first() const { return time == 0; }
  __device__ __forceinline__ bool is_last() const { return time + 1 == 1 << log2_time_lanes; }
};

// Each lane's map of the state, x -> decay x + carry, composed with those of all lanes before it in time (after it, if
// reverse).
template <bool reverse, int max_log2_time_lanes, typename Acc>
__device__ __forceinline__ void scan_lanes(const Lane& lane, Acc& decay, Acc& carry) {
#pragma unroll
  for (int round = 0; round < max_log2_time_lanes; ++round) {
    if (round >= lane.log2_time_lanes) break;
    const int distance = 1 << round, lanes = distance * lane.channels_per_warp;
    const Acc other_carry = reverse ? shuffle_later(carry, lanes) : shuffle_earlier(carry, lanes);
    const Acc other_decay = reverse ? shuffle_later(decay, lanes) : shuffle_earlier(decay, lanes);
    if (reverse ? lane.time + distance < 1 << lane.log2_time_lanes : lane.time >= distance) {
      carry = Math<Acc>::fma(decay, other_carry, carry);
      decay *= other_decay;
    }
  }
}

// Of (channels, dstate) values in shared memory. Odd, so that the channels of a warp lie in different banks.
SSM_HOST_DEVICE int state_pitch(const SelectiveScanParams& p) { return static_cast<int>(p.dstate) | 1; }

// visit(offset in shared memory, channel, state) for each of the block's channels and states, neighbors by neighboring threads.
template <typename Visitor>
__device__ __forceinline__ void for_each_state(const SelectiveScanParams& p, const Position& at, const Visitor& visit) {
  const int dstate = static_cast<int>(p.dstate);
  const int thread = opaque(static_cast<int>(threadIdx.x));
  int channel = thread / dstate, state = thread % dstate;
  const int channel_step = blockDim.x / dstate, state_step = blockDim.x % dstate;
  while (channel < at.channels) {
    visit(channel * state_pitch(p) + state, at.first_channel + channel, state);
    channel += channel_step;
    state += state_step;
    if (state >= dstate) {
      state -= dstate;
      ++channel;
    }
  }
}

// Into (rows, dim, dstate).
__device__ __forceinline__ int64_t state_offset(const SelectiveScanParams& p, int64_t row, int64_t channel, int state) {
  return (row * p.dim + channel) * p.dstate + state;
}

template <typename Acc>
__device__ __forceinline__ Acc load_state(const StateView& view, int64_t batch, int64_t channel, int state) {
  return static_cast<const Acc*>(view.data)[batch * view.stride_batch + channel * view.stride_dim + state * view.stride_state];
}

// By the whole block; the arrays are of `count` values each.
template <typename T, typename... Arrays>
__device__ __forceinline__ void clear(int count, T* first, Arrays... others) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    first[i] = 0;
    ((others[i] = 0), ...);
  }
}

// Carves a block's shared memory into arrays.
class Carver {
 public:
  SSM_HOST_DEVICE explicit Carver(unsigned char* memory) : begin_(memory), next_(memory) {}

  template <typename T>
  SSM_HOST_DEVICE T* take(int count) {
    T* const array = reinterpret_cast<T*>(next_);
    next_ += (static_cast<size_t>(count) * sizeof(T) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    return array;
  }
  SSM_HOST_DEVICE size_t bytes() const { return static_cast<size_t>(next_ - begin_); }

 private:
  unsigned char* begin_;
  unsigned char* next_;
};

// Raises the limit of a kernel's shared memory where it must be raised. Once is enough, but a second time does no harm.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (bytes <= kWithoutAsking) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace ssm_kernels::selective_scan
