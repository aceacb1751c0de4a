// Tiles in shared memory and scans over a warp's lanes, for the warp scan's forward and backward.
//
// A tile of a (batch, dim, seqlen) tensor keeps its memory order in shared memory: the steps of a channel are contiguous, or
// the channels of a step. A lane reads and writes its consecutive steps in either. For steps that descend in memory
// (kDescending), threads reverse each vector of kVectorBytes between its copy and the tile: data of such a tensor points at the
// vector that ends with step 0. Steps and channels past the end are zeros. kVectorBytes of padding before each lane's steps
// put the lanes' vectors into different banks. warp_scan_matrix.cuh has the tiles of B and C.
//
// Rows may start between multiples of kVectorBytes (shifted_io.cuh). Along the steps (kShifted), a warp copies the aligned
// blocks of memory that hold the rows of its channels and moves the elements to their places once they have arrived; it stores
// aligned blocks, and only the elements before a row's first and after its last one singly. Along the channels
// (kShiftedChannels), a row has few vectors, which go through registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/activations.h"
#include "cuda/shifted_io.cuh"
#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"
#include "selective_scan/cuda/transition.cuh"
#include "selective_scan/cuda/warp_scan.h"

namespace ssm_kernels::selective_scan::warp_scan {

constexpr int round_up_to_vector(int elements) { return (elements + kVectorBytes - 1) / kVectorBytes * kVectorBytes; }

// Opaque, so that no predicate register holds the answer through the loop over states, and several tests do not become a jump
// through a table, which is slower.
__device__ __forceinline__ bool is_access(VectorAccess access, VectorAccess tested) {
  return opaque(static_cast<int>(access)) == static_cast<int>(tested);
}

template <typename Scalar>
constexpr bool kHasShiftedVectors = sizeof(Scalar) <= 4;

// Whether the tensors of a call move by the functions for shifted vectors, load_any and so on, of which each kernel has one
// copy outside of its own code: a loop over tiles with those inside fetches its instructions too slowly, and takes 7 to 10 %
// longer.
template <typename Scalar>
__device__ __forceinline__ bool has_shifted_vectors(const ScanPlan& plan) {
  return kHasShiftedVectors<Scalar> && opaque(static_cast<int>(plan.has_shifted_vectors)) != 0;
}

// A kernel's arguments in shared memory, for functions that are not inlined: a reference to the arguments themselves would make
// them read global memory, one load after the other.
template <typename Params>
struct Arguments {
  Params params;
  ScanPlan plan;

  // `place`: in bytes, as place_arguments returns it.
  __device__ __forceinline__ static const Arguments& at(const unsigned char* memory, int place) {
    return *reinterpret_cast<const Arguments*>(memory + place);
  }
};

// Copies the arguments, if any function needs them; the block synchronizes next. Returns their place in `memory`.
template <typename Scalar, int threads, typename Params>
__device__ __forceinline__ int place_arguments(Arguments<Params>* target, const unsigned char* memory, const Params& params,
                                               const ScanPlan& plan) {
  static_assert(sizeof(Params) % sizeof(uint64_t) == 0 && sizeof(ScanPlan) % sizeof(uint64_t) == 0, "copied as words");
  const auto copy = [](void* to, const void* from, int words) {
    for (int i = threadIdx.x; i < words; i += threads) static_cast<uint64_t*>(to)[i] = static_cast<const uint64_t*>(from)[i];
  };
  if (has_shifted_vectors<Scalar>(plan)) {
    copy(&target->params, &params, sizeof(Params) / sizeof(uint64_t));
    copy(&target->plan, &plan, sizeof(ScanPlan) / sizeof(uint64_t));
  }
  return static_cast<int>(reinterpret_cast<const unsigned char*>(target) - memory);
}

// Calls visit(i) for i < count in a loop, so that the code of all tensors of a tile exists once: most of a kernel's time to
// compile went into their copies.
template <typename Visitor>
__device__ __forceinline__ void for_each_tensor(int count, const Visitor& visit) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) visit(i);
}

// Sizes of a block and its tile at compile time.
template <typename Scalar_, int log2_warps, int log2_time_lanes, int log2_steps_per_lane>
struct TileConfig {
  using Scalar = Scalar_;
  using Acc = AccumulateType<Scalar>;
  static constexpr int kThreads = kWarpSize << log2_warps;
  static constexpr int kWarps = 1 << log2_warps;
  static constexpr int kTimeLanes = 1 << log2_time_lanes;
  static constexpr int kLanesPerStep = kWarpSize >> log2_time_lanes;  // the channels of a warp
  static constexpr int kSteps = 1 << log2_steps_per_lane;             // of a lane
  static constexpr int kTileSteps = kSteps * kTimeLanes;
  static constexpr int kTileChannels = kThreads >> log2_time_lanes;
  static_assert(kTileSteps % kShortChunk == 0 && kTileSteps % kLongChunk == 0, "a tile is a multiple of a chunk");
};

template <typename TileConfig>
struct SequenceTile {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr int kChannels = TileConfig::kTileChannels, kSteps = TileConfig::kTileSteps;
  static constexpr int kChannelPitch = kSteps + kVector;
  static constexpr int kCapacity =
      std::max(kChannels * kChannelPitch, round_up_to_vector(kSteps* kChannels + TileConfig::kTimeLanes * kVector));
  // Tiles with fewer channels than a vector are not moved along channels.
  static constexpr bool kHasChannelVectors = kChannels % kVector == 0;

  Scalar* data;
  VectorAccess access;

  __device__ __forceinline__ bool is_along_channels() const {
    return kHasChannelVectors && selective_scan::is_along_channels(access);
  }

  __device__ __forceinline__ Scalar* at(int channel, int step) const {
    if (is_along_channels()) {
      return data + channel + step * kChannels + step / TileConfig::kSteps * kVector;
    }
    return data + channel * kChannelPitch + step;
  }

  __device__ __forceinline__ void read(int channel, int first_step, Acc (&values)[TileConfig::kSteps]) const {
    const Scalar* const source = at(channel, opaque(first_step));
    if (is_along_channels()) {
#pragma unroll
      for (int j = 0; j < TileConfig::kSteps; ++j) values[j] = to_accumulate(source[j * kChannels]);
    } else {
      const auto vector = Vector<Scalar, TileConfig::kSteps>::load(source);
#pragma unroll
      for (int j = 0; j < TileConfig::kSteps; ++j) values[j] = to_accumulate(vector[j]);
    }
  }

  __device__ __forceinline__ void write(int channel, int first_step, const Acc (&values)[TileConfig::kSteps]) const {
    Scalar* const target = at(channel, opaque(first_step));
    if (is_along_channels()) {
#pragma unroll
      for (int j = 0; j < TileConfig::kSteps; ++j) target[j * kChannels] = from_accumulate<Scalar>(values[j]);
    } else {
      Vector<Scalar, TileConfig::kSteps> vector;
#pragma unroll
      for (int j = 0; j < TileConfig::kSteps; ++j) vector.set(j, from_accumulate<Scalar>(values[j]));
      vector.store(target);
    }
  }

  // Called by the whole block, with the row of its first channel. Copies may still be in flight when this returns.
  template <bool along_steps = true>
  __device__ __forceinline__ void load(const SequenceView& view, const Scalar* row, int64_t first_step, int channels,
                                       int steps) const {
    const auto copy = [&](Scalar* element, int64_t offset, int count) {
      cuda::cp_async(element, row + (count ? offset : 0), count * static_cast<int>(sizeof(Scalar)));
    };
    for_each_vector<along_steps>(
        view, first_step, channels, steps, copy, copy,
        [&](Scalar* element, int64_t offset, bool exists) { *element = exists ? row[offset] : from_accumulate<Scalar>(0); });
  }
  // Puts loaded steps that descend in memory in order. Each thread reverses the vectors that it has copied; they have arrived,
  // and the block synchronizes next.
  __device__ __forceinline__ void finish_load() const {
    if (is_access(access, VectorAccess::kDescending)) {
      for_each_descending_vector(
          [](Scalar* element, int, int) { reversed(Vector<Scalar, kVector>::load(element)).store(element); });
    }
  }

  template <bool along_steps = true>
  __device__ __forceinline__ void store(const SequenceView& view, Scalar* row, int64_t first_step, int channels,
                                        int steps) const {
    const auto store_elements = [&](const Scalar* element, int64_t offset, int count) {
      for (int i = 0; i < count; ++i) row[offset + i] = element[i];
    };
    for_each_vector<along_steps>(
        view, first_step, channels, steps,
        [&](const Scalar* element, int64_t offset, int count) {
          if (count == kVector) {
            Vector<Scalar, kVector>::load(element).store_once(row + offset);
          } else {
            store_elements(element, offset, count);
          }
        },
        [&](const Scalar* element, int64_t offset, int count) {
          if (count == kVector) reversed(Vector<Scalar, kVector>::load(element)).store_once(row + offset);
        },
        [&](const Scalar* element, int64_t offset, bool exists) {
          if (exists) row[offset] = *element;
        });
  }

  // Vectors of a thread along the channels.
  static constexpr int kChannelVectors = kHasChannelVectors ? kChannels / kVector : 1;  // of a step
  static constexpr int kStepsOfThread = TileConfig::kThreads / kChannelVectors;         // from one to the next
  static constexpr int kLoads = (kSteps + kStepsOfThread - 1) / kStepsOfThread;
  // Shifted vectors along the channels on their way to registers.
  struct ChannelLoads {
    cuda::ShiftedLoad<Scalar, kVector> loads[kLoads];
  };

  // The same of tensors of which some have shifted vectors; absent tensors are left out. Those along the channels are left in
  // flight, so that a block waits once for all of its tensors: load_channels_any and store_loads_any move them, load_any the
  // others. Aligned rows along the steps move as shifted ones do. channels_left: to the tensor's end.
  __device__ __forceinline__ bool has_shifted_channels(const SequenceView& view) const {
    static_assert(sizeof(Scalar) > 4 || kHasChannelVectors, "shifted vectors along the channels are whole");
    return view.data != nullptr && access == VectorAccess::kShiftedChannels;
  }
  __device__ __forceinline__ bool is_along_steps() const {
    return access == VectorAccess::kShifted || access == VectorAccess::kAlongSteps;
  }
  __device__ __forceinline__ void load_any(const SequenceView& view, const Scalar* row, int64_t first_step, int channels,
                                           int steps) const {
    if (view.data == nullptr || access == VectorAccess::kShiftedChannels) return;
    if (is_along_steps()) {
      copy_shifted_rows(view, row, first_step, channels, steps);
    } else {
      load<false>(view, row, first_step, channels, steps);
    }
  }
  __device__ __forceinline__ void load_channels_any(const SequenceView& view, const Scalar* row, int64_t first_step,
                                                    int channels, int steps, int64_t channels_left,
                                                    ChannelLoads& in_flight) const {
    if (has_shifted_channels(view)) load_shifted_channels(view, row, first_step, channels, steps, channels_left, in_flight);
  }
  __device__ __forceinline__ void store_loads_any(const SequenceView& view, const ChannelLoads& in_flight) const {
    if (has_shifted_channels(view)) store_shifted_loads(in_flight);
  }
  // Each warp moves the elements of its shifted rows to their places.
  __device__ __forceinline__ void finish_load_any(const SequenceView& view, const Scalar* row, int64_t first_step) const {
    if (view.data == nullptr) return;
    if (access == VectorAccess::kShifted) {
      shift_rows(view, row, first_step);
    } else {
      finish_load();
    }
  }
  __device__ __forceinline__ void store_any(const SequenceView& view, Scalar* row, int64_t first_step, int channels,
                                            int steps) const {
    if (view.data == nullptr) return;
    if (is_along_steps()) {
      store_shifted_rows(view, row, first_step, channels, steps);
    } else if (access == VectorAccess::kShiftedChannels) {
      store_shifted_channels(view, row, first_step, channels, steps);
    } else {
      store<false>(view, row, first_step, channels, steps);
    }
  }

 private:
  // Calls visit(element in the tile, channel, step) for each vector along the steps.
  template <int unroll, typename Visitor>
  __device__ __forceinline__ void for_each_vector_along_steps(const Visitor& visit) const {
    constexpr int kRowVectors = kSteps / kVector, kRows = TileConfig::kThreads / kRowVectors;
    static_assert(TileConfig::kThreads % kRowVectors == 0, "a thread's vectors are the same steps of several channels");
    const int thread = opaque_thread(), step = thread % kRowVectors * kVector;
#pragma unroll unroll
    for (int first = 0; first < kChannels; first += kRows) {
      const int channel = first + thread / kRowVectors;
      if (kChannels % kRows != 0 && channel >= kChannels) break;
      visit(data + channel * kChannelPitch + step, channel, step);
    }
  }
  // The same for steps that descend in memory: not unrolled, to leave the instruction cache to other code.
  template <typename Visitor>
  __device__ __forceinline__ void for_each_descending_vector(const Visitor& visit) const {
    for_each_vector_along_steps<1>(visit);
  }

  // Calls visit(element in the tile, channel, step) for each vector along the steps of the warp's own channels, which are those
  // of its lanes. All lanes take part in each round, in the order of the elements.
  template <typename Visitor>
  __device__ __forceinline__ void for_each_vector_of_warp(const Visitor& visit) const {
    constexpr int kRowVectors = kSteps / kVector, kVectors = TileConfig::kLanesPerStep * kRowVectors;
    static_assert(kVectors % kWarpSize == 0, "a warp's rows are whole rounds of its lanes");
    const int thread = opaque_thread();
#pragma unroll 1
    for (int i = thread % kWarpSize; i < kVectors; i += kWarpSize) {
      const int channel = thread / kWarpSize * TileConfig::kLanesPerStep + i / kRowVectors, step = i % kRowVectors * kVector;
      visit(data + channel * kChannelPitch + step, channel, step);
    }
  }
  // Copies the blocks that hold the warp's rows: one more than a row's vectors, in the padding.
  __device__ __forceinline__ void copy_shifted_rows(const SequenceView& view, const Scalar* row, int64_t first_step,
                                                    int channels, int steps) const {
    static_assert(kChannelPitch >= kSteps + kVector, "a shifted row has one block more than vectors");
    for_each_vector_of_warp([&](Scalar* element, int channel, int step) {
      const Scalar* const source = row + channel * view.stride_dim + first_step + step;
      // Without a channel none, not even the part before the row's first element.
      const int bytes = channel < channels ? (steps - step) * static_cast<int>(sizeof(Scalar)) : -kVectorBytes;
      cuda::cp_async_block<false>(element, source, bytes);
      if (step + kVector == kSteps) cuda::cp_async_block<true>(element + kVector, source, bytes);
    });
  }
  // Moves the elements of the warp's rows to their places. A round reads the first block of the next one before that is
  // written.
  __device__ __forceinline__ void shift_rows(const SequenceView& view, const Scalar* row, int64_t first_step) const {
    static_assert(kSteps * sizeof(Scalar) % kVectorBytes == 0, "all tiles of a row have the same shift");
    __syncwarp();
    for_each_vector_of_warp([&](Scalar* element, int channel, int) {
      const int past = cuda::bytes_past_multiple<kVectorBytes>(row + channel * view.stride_dim + first_step);
      const auto vector = cuda::load_shifted_shared<Scalar, kVector>(reinterpret_cast<const char*>(element), past);
      __syncwarp();
      vector.store(element);
    });
  }
  // Stores the aligned blocks of the warp's rows. The lane with a row's first block, which begins before the row, stores the
  // elements after the tile's last whole block, too: together they are one block.
  __device__ __forceinline__ void store_shifted_rows(const SequenceView& view, Scalar* row, int64_t first_step, int channels,
                                                     int steps) const {
    for_each_vector_of_warp([&](const Scalar* element, int channel, int step) {
      if (channel >= channels) return;
      Scalar* const target = row + channel * view.stride_dim + first_step;
      const int past = cuda::bytes_past_multiple<kVectorBytes>(target) / static_cast<int>(sizeof(Scalar));
      const int first = step - past;
      const Scalar* const source = element - step;
      if (first >= 0 && first + kVector <= steps) {
        cuda::load_shifted_shared<Scalar, kVector>(reinterpret_cast<const char*>(source),
                                                   first * static_cast<int>(sizeof(Scalar)))
            .store_once(target + first);
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int at = first + j < 0 ? kSteps + first + j : first + j;
          if (at < steps) target[at] = source[at];
        }
      }
    });
  }
  // Calls visit(element in the tile, offset in the tensor, count) for each vector along the channels, `count` of whose elements
  // exist in the tile.
  template <typename Visitor>
  __device__ __forceinline__ void for_each_vector_along_channels(const SequenceView& view, int64_t first_step, int channels,
                                                                 int steps, const Visitor& visit) const {
    const int thread = opaque_thread(), channel = thread % kChannelVectors * kVector;
    const int count = max(0, min(kVector, channels - channel));
    const int64_t first = first_step * view.stride_step;
#pragma unroll 1
    for (int step = thread / kChannelVectors; step < kSteps; step += kStepsOfThread) {
      visit(at(channel, step), first + channel + step * view.stride_step, step < steps ? count : 0);
    }
  }
  // Pieces of whole vectors may reach into channels of other tiles; other vectors are loaded element by element.
  __device__ __forceinline__ void load_shifted_channels(const SequenceView& view, const Scalar* row, int64_t first_step,
                                                        int channels, int steps, int64_t channels_left,
                                                        ChannelLoads& in_flight) const {
    const int thread = opaque_thread(), channel = thread % kChannelVectors * kVector;
    const int left = channel + kVector <= channels ? static_cast<int>(min(channels_left - channel, int64_t(2 * kVector)))
                                                   : channels - channel;
    const Scalar* const first = row + first_step * view.stride_step + channel;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int step = thread / kChannelVectors + i * kStepsOfThread;
      in_flight.loads[i] = {first + step * view.stride_step, step < steps ? left : 0};
    }
  }
  __device__ __forceinline__ void store_shifted_loads(const ChannelLoads& in_flight) const {
    const int thread = opaque_thread();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int step = thread / kChannelVectors + i * kStepsOfThread;
      if (kSteps % kStepsOfThread == 0 || step < kSteps) {
        in_flight.loads[i].vector().store(at(thread % kChannelVectors * kVector, step));
      }
    }
  }
  __device__ __forceinline__ void store_shifted_channels(const SequenceView& view, Scalar* row, int64_t first_step,
                                                         int channels, int steps) const {
    for_each_vector_along_channels(view, first_step, channels, steps, [&](const Scalar* element, int64_t offset, int count) {
      cuda::store_shifted(row + offset, Vector<Scalar, kVector>::load(element), count);
    });
  }

  // Calls visit(element in the tile, offset in the tensor, count) for each vector, of which `count` elements exist; of steps
  // that descend in memory visit_descending; or visit_element(element in the tile, offset in the tensor, exists) for each
  // element. along_steps: whether the access may be kAlongSteps.
  template <bool along_steps, typename Visitor, typename DescendingVisitor, typename ElementVisitor>
  __device__ __forceinline__ void for_each_vector(const SequenceView& view, int64_t first_step, int channels, int steps,
                                                  const Visitor& visit, const DescendingVisitor& visit_descending,
                                                  const ElementVisitor& visit_element) const {
    const auto count_of = [&](int channel, int step) { return channel < channels ? max(0, min(kVector, steps - step)) : 0; };
    if (along_steps && is_access(access, VectorAccess::kAlongSteps)) {
      for_each_vector_along_steps<kChannels>([&](Scalar* element, int channel, int step) {
        visit(element, channel * view.stride_dim + first_step + step, count_of(channel, step));
      });
    } else if (is_access(access, VectorAccess::kDescending)) {
      for_each_descending_vector([&](Scalar* element, int channel, int step) {
        visit_descending(element, channel * view.stride_dim - first_step - step, count_of(channel, step));
      });
    } else if (is_along_channels()) {
      for_each_vector_along_channels(view, first_step, channels, steps, visit);
    } else {
      const int thread = opaque_thread();
      const bool steps_are_closer = are_steps_closer(view.stride_step, view.stride_dim);
      const int64_t first = first_step * view.stride_step;
#pragma unroll 1
      for (int i = thread; i < kChannels * kSteps; i += TileConfig::kThreads) {
        const int channel = steps_are_closer ? i / kSteps : i % kChannels, step = steps_are_closer ? i % kSteps : i / kChannels;
        visit_element(at(channel, step), first + channel * view.stride_dim + step * view.stride_step,
                      channel < channels && step < steps);
      }
    }
  }
};

// Calls scan(is_tail, method) with the tile's method and a function that says whether the tile is partial. kPerStep and kCarry
// know the answer at compile time, and so have their loop over states twice; kAny tests it for each state. In a partial tile A
// is zero past the end, because a step size of zero times an infinite A is NaN.
template <typename TileConfig, typename Method, Pass pass, typename Scan>
__device__ __forceinline__ void visit_tile(const SelectiveScanParams& p, const MethodParameters& parameters, int steps,
                                           const Scan& scan) {
  visit_method<Method>(p, parameters, [&](auto method) {
    if constexpr (pass == Pass::kAny) {
      scan([&] { return opaque(steps) < TileConfig::kTileSteps; }, method);
    } else if (steps < TileConfig::kTileSteps) {
      scan([] { return true; }, method);
    } else {
      scan([] { return false; }, method);
    }
  });
}

// delta = softplus?(raw + bias) in place. Steps from `valid` on have size zero, which changes neither the state nor its
// adjoint.
template <int count, typename Acc>
__device__ __forceinline__ void make_step_sizes(Acc (&delta)[count], Acc bias, bool apply_softplus, int valid) {
#pragma unroll
  for (int j = 0; j < count; ++j) delta[j] += bias;
  if (apply_softplus) {
#pragma unroll
    for (int j = 0; j < count; ++j) delta[j] = softplus(delta[j]);
  }
  if (valid < count) {
#pragma unroll
    for (int j = 0; j < count; ++j) delta[j] = j < valid ? delta[j] : Acc(0);
  }
}

template <typename Acc>
__device__ __forceinline__ Acc shuffle_earlier(Acc value, int lanes) {
  return __shfl_up_sync(kAllLanes, value, lanes);
}
template <typename Acc>
__device__ __forceinline__ Acc shuffle_later(Acc value, int lanes) {
  return __shfl_down_sync(kAllLanes, value, lanes);
}

// A thread's channel and its position in time. The lane number in a warp is time * kLanesPerStep + channel_in_warp.
template <typename TileConfig>
struct Lane {
  int time, channel_in_warp, channel;

  __device__ __forceinline__ Lane() {
    const int lane = threadIdx.x % kWarpSize;
    time = lane / TileConfig::kLanesPerStep;
    channel_in_warp = lane % TileConfig::kLanesPerStep;
    channel = threadIdx.x / kWarpSize * TileConfig::kLanesPerStep + channel_in_warp;
  }
  __device__ __forceinline__ bool is_first() const { return time == 0; }
  __device__ __forceinline__ bool is_last() const { return time + 1 == TileConfig::kTimeLanes; }
};

// Composes each lane's affine map of the state, x -> decay x + offset, with the map of the lane `lanes` earlier (later if
// reverse) if that lane exists. For floats the shuffle's predicate says whether it does.
template <bool reverse, int lanes>
__device__ __forceinline__ void compose_with_lane(float& decay, float& offset) {
  if constexpr (reverse) {
    asm volatile(
        "{\n.reg .pred exists;\n.reg .f32 other_offset, other_decay;\n"
        "shfl.sync.down.b32 other_offset|exists, %0, %2, 0x1f, 0xffffffff;\n"
        "shfl.sync.down.b32 other_decay, %1, %2, 0x1f, 0xffffffff;\n"
        "@exists fma.rn.f32 %0, %1, other_offset, %0;\n@exists mul.rn.f32 %1, %1, other_decay;\n}"
        : "+f"(offset), "+f"(decay)
        : "n"(lanes));
  } else {
    asm volatile(
        "{\n.reg .pred exists;\n.reg .f32 other_offset, other_decay;\n"
        "shfl.sync.up.b32 other_offset|exists, %0, %2, 0x0, 0xffffffff;\n"
        "shfl.sync.up.b32 other_decay, %1, %2, 0x0, 0xffffffff;\n"
        "@exists fma.rn.f32 %0, %1, other_offset, %0;\n@exists mul.rn.f32 %1, %1, other_decay;\n}"
        : "+f"(offset), "+f"(decay)
        : "n"(lanes));
  }
}
template <bool reverse, int lanes>
__device__ __forceinline__ void compose_with_lane(double& decay, double& offset) {
  const int lane = threadIdx.x % kWarpSize;
  const double other_offset = reverse ? shuffle_later(offset, lanes) : shuffle_earlier(offset, lanes);
  const double other_decay = reverse ? shuffle_later(decay, lanes) : shuffle_earlier(decay, lanes);
  if (reverse ? lane + lanes < kWarpSize : lane >= lanes) {
    offset = Math<double>::fma(decay, other_offset, offset);
    decay *= other_decay;
  }
}

// Inclusive scan over time: composes each lane's map with the maps of all earlier lanes (later ones if reverse).
template <typename TileConfig, bool reverse = false, int distance = 1>
__device__ __forceinline__ void scan_lanes(typename TileConfig::Acc& decay, typename TileConfig::Acc& offset) {
  if constexpr (distance < TileConfig::kTimeLanes) {
    compose_with_lane<reverse, distance * TileConfig::kLanesPerStep>(decay, offset);
    scan_lanes<TileConfig, reverse, 2 * distance>(decay, offset);
  }
}

// A forward and a reverse scan, interleaved to hide the latency of shuffles.
template <typename TileConfig, int distance = 1, typename Acc>
__device__ __forceinline__ void scan_lanes_both_ways(Acc& decay, Acc& offset, Acc& reverse_decay, Acc& reverse_offset) {
  if constexpr (distance < TileConfig::kTimeLanes) {
    compose_with_lane<false, distance * TileConfig::kLanesPerStep>(decay, offset);
    compose_with_lane<true, distance * TileConfig::kLanesPerStep>(reverse_decay, reverse_offset);
    scan_lanes_both_ways<TileConfig, 2 * distance>(decay, offset, reverse_decay, reverse_offset);
  }
}

// Rows of states in shared memory: one per channel of the block, and one of zeros if some lanes have no channel.
template <typename TileConfig>
SSM_HOST_DEVICE int state_rows(const ScanPlan& plan) {
  return plan.block_channels < TileConfig::kTileChannels ? plan.block_channels + 1 : TileConfig::kTileChannels;
}

// The pitch of (channels, dstate) values in shared memory; odd, so that the channels of a warp are in different banks.
SSM_HOST_DEVICE int state_pitch(const SelectiveScanParams& p) { return static_cast<int>(p.dstate) | 1; }

// Calls visit(index in shared memory, offset in (channels, dstate), channel, state) for the block's channels and states,
// consecutive ones by consecutive threads.
template <typename TileConfig, typename Visitor>
__device__ __forceinline__ void for_each_state(const SelectiveScanParams& p, const ScanPlan& plan, int channels,
                                               const Visitor& visit) {
  const int count = channels * static_cast<int>(p.dstate);
#pragma unroll 1
  for (int i = opaque_thread(); i < count; i += TileConfig::kThreads) {
    const int channel = static_cast<int>(plan.dstate.divide(static_cast<uint32_t>(i))),
              state = i - channel * static_cast<int>(p.dstate);
    visit(channel * state_pitch(p) + state, i, channel, state);
  }
}

// Launches the carry pass if time is split into segments: for all segments except the last (in backward: except the first).
template <typename Launch>
cudaError_t launch_carry_pass(ScanPlan plan, int64_t first_segment, const Launch& launch) {
  if (plan.segments == 1) return cudaSuccess;
  plan.carry_pass = true;
  plan.first_segment = first_segment;
  plan.launched_segments = plan.segments - 1;
  return launch(plan);
}

// Called by the whole block.
template <typename TileConfig>
__device__ __forceinline__ void clear(typename TileConfig::Acc* array, int count) {
  for (int i = threadIdx.x; i < count; i += TileConfig::kThreads) array[i] = 0;
}

}  // namespace ssm_kernels::selective_scan::warp_scan
