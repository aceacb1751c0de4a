// Tiles of the sequential scan on the device, for forward and backward: moves between global memory, registers and shared
// memory, and the consumers' view of a tile.
//
// Producer threads own vectors of kVectorBytes of a (batch, dim, seqlen) tensor's tile, along the steps or along the channels,
// whichever is contiguous in memory. A thread owns the same elements of every tensor. Consumers read the tile from shared
// memory in the accumulation type, with the steps of a channel contiguous.
//
// In a tile with shifted vectors, rows (of steps, or of channels) may start at any element and end before the tile does, and
// channels or steps may be missing. In forward every tile that is not whole or not aligned is one, but for tiles along
// descending steps. In backward the tiles of a call are all or none: aligned rows there are whole vectors, each of which exists
// or not.
//
// The vectors of steps that descend in memory (kDescending) are aligned and whole, or absent. Threads reverse them in
// registers. The data of such a tensor points at the vector that ends at its first step.
#pragma once

#include "common/activations.h"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/shifted_io.cuh"
#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/sequential.h"
#include "selective_scan/cuda/shared_arrays.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Sizes of a block and its tile at compile time.
template <typename Scalar_, int tile_steps>
struct TileConfig {
  using Scalar = Scalar_;
  using Acc = AccumulateType<Scalar>;
  static constexpr int kConsumers = kConsumerWarps * kWarpSize;  // threads
  static constexpr int kProducers = kProducerWarps * kWarpSize;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kWarpRows = kWarpSize / kStateLanes;  // channels of a warp that differ by lane
  static constexpr int kTileSteps = tile_steps;
  static_assert(chunk_length(kStates) % kTileSteps == 0, "a chunk is a multiple of a tile: the state is saved after a tile");
};

// The channels and states in a consumer thread's registers. Neighboring state lanes hold neighboring states, so that they read
// rows of B and C from different banks.
//
// With `permuted`, the order of a thread's channels in its registers depends on its state lane, and the order of its states on
// its row. In an exchange of sums, all lanes then keep the same registers and send the same registers.
template <typename TileConfig, bool permuted>
struct ConsumerLane {
  int state_lane, row, first_channel;

  __device__ __forceinline__ ConsumerLane() {
    const int lane = threadIdx.x % kWarpSize;
    state_lane = lane % kStateLanes;
    row = lane / kStateLanes;
    first_channel = static_cast<int>(threadIdx.x) / kWarpSize * TileConfig::kWarpRows * kLaneChannels + row;
  }
  __device__ __forceinline__ int channel(int k) const {
    static_assert(kLaneChannels == 2, "a lane has two channels, which may be swapped");
    return first_channel + (permuted ? k ^ (state_lane & 1) : k) * TileConfig::kWarpRows;
  }
  __device__ __forceinline__ int state(int i) const {
    return state_lane + (permuted ? i ^ (row & (kLaneStates - 1)) : i) * kStateLanes;
  }
};

// Calls visit(k, i, channel, state, exists) for each channel k and state i of a consumer thread.
template <typename ConsumerLane, typename Visitor>
__device__ __forceinline__ void for_each_state(const SelectiveScanParams& p, const Position& at, const ConsumerLane& lane,
                                               const Visitor& visit) {
  const int channels = at.channels;
#pragma unroll
  for (int k = 0; k < kLaneChannels; ++k) {
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      const int channel = lane.channel(k), state = lane.state(i);
      visit(k, i, channel, state, channel < channels && state < static_cast<int>(p.dstate));
    }
  }
}

// Stores a consumer's values in row `row` of a (rows, dim, dstate) array.
template <typename ConsumerLane, typename Acc>
__device__ __forceinline__ void save_states(const SelectiveScanParams& p, const Position& at, const ConsumerLane& lane,
                                            const Acc (&values)[kLaneChannels][kLaneStates], void* array, int64_t row) {
  Acc* const target = static_cast<Acc*>(array) + state_offset(p, row, at.first_channel, 0);
  for_each_state(p, at, lane, [&](int k, int i, int channel, int state, bool exists) {
    if (exists) target[channel * static_cast<int>(p.dstate) + state] = values[k][i];
  });
}

// A tile in shared memory in the accumulation type. Groups of steps are swizzled by XOR with the channel: the groups of
// neighboring channels, which lanes read together, and of channels eight apart, which threads write together, are in different
// banks.
template <typename TileConfig>
struct TileArray {
  using Acc = typename TileConfig::Acc;
  static constexpr int kCapacity = kTileChannels * TileConfig::kTileSteps;

  Acc* data;

  // A step's place in its channel's row is step ^ swizzle(channel).
  __device__ __forceinline__ static int swizzle(int channel) {
    constexpr int kGroups = TileConfig::kTileSteps / kGroupSteps, kSwizzled = kGroups < 8 ? kGroups : 8;
    static_assert((kGroups & (kGroups - 1)) == 0 && kGroups <= 32, "groups are swizzled by XOR");
    return (channel / (8 / kSwizzled) + channel / 8) % kSwizzled * kGroupSteps;
  }
  __device__ __forceinline__ static int offset(int channel, int step) {
    return channel * TileConfig::kTileSteps + (step ^ swizzle(channel));
  }
  __device__ __forceinline__ Acc* at(int channel, int step) const { return data + offset(channel, step); }
};

// The groups of steps of a consumer thread's channels in an array of a tile. The addresses of the channels are computed once a
// tile, so that a group's takes two instructions. Otherwise the compiler computes them from the thread's index for each group,
// and the group's loads wait for a chain of instructions.
template <typename TileConfig>
class LaneRows {
 public:
  template <typename ConsumerLane>
  __device__ __forceinline__ LaneRows(const ConsumerLane& lane, TileArray<TileConfig> array) {
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) {
      row_[k] = cuda::opaque_shared_address(array.data + lane.channel(k) * TileConfig::kTileSteps);
      swizzle_[k] = opaque(TileArray<TileConfig>::swizzle(lane.channel(k)) * kBytes);
    }
  }
  // The address of channel k's group at step t.
  __device__ __forceinline__ uint32_t at(int k, int t) const { return row_[k] + (t * kBytes ^ swizzle_[k]); }

 private:
  static constexpr int kBytes = sizeof(typename TileConfig::Acc);
  uint32_t row_[kLaneChannels];
  int swizzle_[kLaneChannels];
};

// Whether a consumer warp's values of a group of steps are finite. Called by the whole warp.
template <typename TileConfig, bool permuted>
__device__ __forceinline__ bool is_finite(TileArray<TileConfig> tile, const ConsumerLane<TileConfig, permuted>& lane, int t) {
  using Acc = typename TileConfig::Acc;
  Acc sum = 0;
#pragma unroll
  for (int k = 0; k < kLaneChannels; ++k) {
    const auto group = Vector<Acc, kGroupSteps>::load(tile.at(lane.channel(k), t));
#pragma unroll
    for (int j = 0; j < kGroupSteps; ++j) sum = Math<Acc>::fma(group[j], Acc(0), sum);
  }
  return __all_sync(kAllLanes, sum == 0);
}

// The elements of a tile that a producer thread owns: kCount vectors, along the steps or along the channels.
template <typename TileConfig, VectorAccess access>
struct ThreadVectors {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr bool kAlongChannels = is_along_channels(access), kIsShifted = is_shifted(access);
  static constexpr bool kDescends = access == VectorAccess::kDescending;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr int kCount = kTileChannels * TileConfig::kTileSteps / (kVector * TileConfig::kProducers);
  static constexpr int kPerRow = TileConfig::kTileSteps / kVector, kPerStep = kTileChannels / kVector;
  static constexpr int kRows = TileConfig::kProducers / kPerRow;    // channels from one vector along the steps to the next
  static constexpr int kSteps = TileConfig::kProducers / kPerStep;  // steps from one vector along the channels to the next
  static_assert(kCount * kVector * TileConfig::kProducers == kTileChannels * TileConfig::kTileSteps,
                "threads share a tile evenly");
  static_assert(kRows * kPerRow == TileConfig::kProducers && kSteps * kPerStep == TileConfig::kProducers,
                "a thread's vectors differ in one coordinate");
  // The vectors of a row in memory, and those of a warp.
  static constexpr int kRowVectors = kAlongChannels ? kPerStep : kPerRow;
  static_assert(kWarpSize % kPerRow == 0 && kWarpSize % kPerStep == 0, "a warp copies whole rows, and reads no others");
  static_assert(kPerRow <= kPerStep, "a warp's shifted rows along the channels take no more blocks than those along the steps");
  using Raw = Vector<Scalar, kVector>;
  // Elements of a vector that are computed at a time.
  static constexpr int kPart = kVector < kGroupSteps ? kVector : kGroupSteps;
  // Vectors of a raw tile in shared memory: the blocks of kVectorBytes that hold a shifted row are one more than its vectors.
  static constexpr int kStage = kTileChannels * (kPerRow + 1);

  int thread;

  __device__ __forceinline__ int channel(int i) const {
    return kAlongChannels ? thread % kPerStep * kVector : thread / kPerRow + i * kRows;
  }
  __device__ __forceinline__ int step(int i) const {
    return kAlongChannels ? thread / kPerStep + i * kSteps : thread % kPerRow * kVector;
  }
  // The number of elements of a vector and after it in its row; none are left if not positive.
  __device__ __forceinline__ int left(int i, int channels, int steps) const {
    if constexpr (kAlongChannels) return step(i) < steps ? channels - channel(i) : -kVector;
    return channel(i) < channels ? steps - step(i) : -kVector;
  }

  // The address of the thread's first vector. `row` is the row of the block's first channel.
  __device__ __forceinline__ Scalar* address(const SequenceView& view, Scalar* row, int64_t first_step) const {
    return row + (first_step + step(0)) * view.stride_step + channel(0) * view.stride_dim;
  }
  // From one vector to the next.
  __device__ __forceinline__ int64_t stride(const SequenceView& view) const {
    return kAlongChannels ? kSteps * view.stride_step : kRows * view.stride_dim;
  }
  // The place in memory of `size` elements of a vector, from element `first` on.
  template <int size>
  __device__ __forceinline__ static constexpr int part_offset(int first) {
    return kDescends ? kVector - size - first : first;
  }
  // Loads `size` elements at an address of a tensor. Only shifted vectors may have fewer left, and descending ones none: others
  // are read as if they existed. Elements that do not exist have any value. vector_of() takes what it returns.
  template <int size>
  using Load = std::conditional_t<kIsShifted, cuda::ShiftedPieces<Scalar, size>, Vector<Scalar, size>>;
  template <int size>
  __device__ __forceinline__ static Load<size> load(const Scalar* source, int left) {
    if constexpr (kIsShifted) {
      return {source, left};
    } else if constexpr (kDescends) {
      return left > 0 ? Load<size>::load_once(source) : Load<size>::zero();
    } else {
      return Load<size>::load_once(source);
    }
  }
  template <int size>
  __device__ __forceinline__ static Vector<Scalar, size> vector_of(const Load<size>& load) {
    if constexpr (kIsShifted) {
      return load.vector();
    } else if constexpr (kDescends) {
      return reversed(load);
    } else {
      return load;
    }
  }
  template <int size>
  __device__ __forceinline__ static void store(const Vector<Scalar, size>& vector, Scalar* target, int left) {
    if constexpr (kIsShifted) {
      cuda::store_shifted(target, vector, left);
    } else if constexpr (kDescends) {
      if (left > 0) reversed(vector).store_once(target);
    } else {
      if (left > 0) vector.store_once(target);
    }
  }
  // The place of vector i in a raw tile in shared memory; of a shifted vector, the block that holds its first byte. A warp's
  // vectors along the steps, shifted or not, have the same part of the tile: a shifted tile may follow one that is not while
  // other warps still read that one.
  __device__ __forceinline__ int place(int i) const {
    constexpr int kRowsOfWarp = kWarpSize / kPerRow;
    const int in_warp = kIsShifted ? thread % kWarpSize / kRowVectors : 0;
    const int blocks_before = thread / kWarpSize * kRowsOfWarp + in_warp;
    return thread + blocks_before + i * (TileConfig::kProducers + TileConfig::kProducers / kPerRow);
  }
  // Starts asynchronous copies into a raw tile, of the vectors from the thread's `first` on and, of a shifted row, its last
  // block. A row's elements from `steps` on, the steps that are left, become zeros.
  __device__ __forceinline__ void copy_async(const SequenceView& view, const Scalar* first, Raw* stage, int channels,
                                             int steps) const {
    const bool is_last_in_row = thread % kRowVectors == kRowVectors - 1;
    if constexpr (kIsShifted) {
      // Most tiles have whole vectors. The block after a row's last one holds `past` of its bytes.
      if (channels == kTileChannels && steps >= TileConfig::kTileSteps) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const char* const source = reinterpret_cast<const char*>(first + i * stride(view));
          const int past = cuda::bytes_past_multiple<kVectorBytes>(source);
          cuda::cp_async<kVectorBytes>(stage + place(i), source - past);
          if (is_last_in_row) cuda::cp_async(stage + place(i) + 1, source - past + kVectorBytes, past);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Scalar* const source = first + i * stride(view);
      Raw* const target = stage + place(i);
      if constexpr (kIsShifted) {
        const int bytes = left(i, channels, steps) * static_cast<int>(sizeof(Scalar));
        cuda::cp_async_block<false>(target, source, bytes);
        if (is_last_in_row) cuda::cp_async_block<true>(target + 1, source, bytes);
      } else if constexpr (kDescends) {
        cuda::cp_async(target, source, left(i, channels, steps) > 0 ? kVectorBytes : 0);
      } else {
        cuda::cp_async(target, source, kVectorBytes);
      }
    }
  }
  // Vector i of a raw tile. `first` is where its copies began, in this tile or another: all start rows at the same byte.
  __device__ __forceinline__ Raw get_raw(const SequenceView& view, const Scalar* first, const Raw* stage, int i) const {
    if constexpr (kIsShifted) {
      static_assert(TileConfig::kTileSteps * sizeof(Scalar) % kVectorBytes == 0, "all tiles have the same shift");
      const int past = cuda::bytes_past_multiple<kVectorBytes>(first + i * stride(view));
      return cuda::load_shifted_shared<Scalar, kVector>(reinterpret_cast<const char*>(stage + place(i)), past);
    } else if constexpr (kDescends) {
      return reversed(stage[place(i)]);
    } else {
      return stage[place(i)];
    }
  }
  // Moves `count` elements of vector i, from element `first` on, between registers and a tile in shared memory.
  template <int count>
  __device__ __forceinline__ void put(TileArray<TileConfig> tile, int i, int first, const Acc (&values)[count]) const {
    if constexpr (kAlongChannels) {
#pragma unroll
      for (int j = 0; j < count; ++j) *tile.at(channel(i) + first + j, step(i)) = values[j];
    } else {
      constexpr int kTogether = count < kGroupSteps ? count : kGroupSteps;
#pragma unroll
      for (int j = 0; j < count; j += kTogether) {
        Acc group[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) group[k] = values[j + k];
        store_array(tile.at(channel(i), step(i) + first + j), group);
      }
    }
  }
  template <int count>
  __device__ __forceinline__ void get(TileArray<TileConfig> tile, int i, int first, Acc (&values)[count]) const {
    if constexpr (kAlongChannels) {
#pragma unroll
      for (int j = 0; j < count; ++j) values[j] = *tile.at(channel(i) + first + j, step(i));
    } else {
      constexpr int kTogether = count < kGroupSteps ? count : kGroupSteps;
#pragma unroll
      for (int j = 0; j < count; j += kTogether) {
        Acc group[kTogether];
        load_array(tile.at(channel(i), step(i) + first + j), group);
#pragma unroll
        for (int k = 0; k < kTogether; ++k) values[j + k] = group[k];
      }
    }
  }
  // The same elements of an array in shared memory that has one value per channel.
  template <int count>
  __device__ __forceinline__ void get_channels(const Acc* array, int i, int first, Acc (&values)[count]) const {
    if constexpr (kAlongChannels) {
      load_array(array + channel(i) + first, values);
    } else {
      const Acc value = array[channel(i)];
#pragma unroll
      for (int j = 0; j < count; ++j) values[j] = value;
    }
  }
  template <typename Raw, int count>
  __device__ __forceinline__ static void widen(const Raw& raw, int first, Acc (&values)[count]) {
#pragma unroll
    for (int j = 0; j < count; ++j) values[j] = raw.accumulate(first + j);
  }
  template <typename Raw, int count>
  __device__ __forceinline__ static void narrow(const Acc (&values)[count], int first, Raw& raw) {
    const auto rounded = Vector<Scalar, count>::round(values);
    memcpy(reinterpret_cast<char*>(raw.accesses) + first * sizeof(Scalar), &rounded, sizeof(rounded));
  }
  // delta = softplus?(raw + bias) and u of `count` elements of vector i, from `first` on, which are element `first_raw` of what
  // is loaded.
  template <typename Raw, int count>
  __device__ __forceinline__ void get_steps(const Raw& raw_delta, const Raw& raw_u, int first_raw, const Acc* biases,
                                            bool apply_softplus, int i, int first, Acc (&delta)[count], Acc (&u)[count]) const {
    Acc bias[count];
    get_channels(biases, i, first, bias);
    widen(raw_delta, first_raw, delta);
    widen(raw_u, first_raw, u);
#pragma unroll
    for (int j = 0; j < count; ++j) delta[j] += bias[j];
    if (apply_softplus) {
#pragma unroll
      for (int j = 0; j < count; ++j) delta[j] = softplus(delta[j]);
    }
  }
};

// Whether the tile that starts at t0 has all its channels and steps.
template <typename TileConfig>
__device__ __forceinline__ bool is_whole(const Position& at, int64_t t0) {
  return at.channels == kTileChannels && t0 + TileConfig::kTileSteps <= at.end;
}

enum NamedBarrier : int { kRolesBarrier = 1 };

// Synchronizes producers and consumers, once a tile, and makes their writes to shared memory visible to each other.
template <typename TileConfig>
__device__ __forceinline__ void sync_roles() {
  cuda::barrier_sync(kRolesBarrier, TileConfig::kThreads);
}

// Sets up a block's position, its rows, and D and delta_bias of its channels.
template <typename TileConfig, typename Rows, typename Params, typename Shared>
__device__ __forceinline__ void begin_block(const Params& p, const ScanPlan& plan, const Shared& shared) {
  using Acc = typename TileConfig::Acc;
  if (threadIdx.x == 0) {
    *shared.position = Position(p, plan, blockIdx.x);
    *shared.rows = Rows(p, *shared.position);
  }
  __syncthreads();
  const Position& at = *shared.position;
  for (int channel = threadIdx.x; channel < kTileChannels; channel += TileConfig::kThreads) {
    const auto of_channel = [&](const ChannelView& view) {
      if (channel >= at.channels || view.data == nullptr) return Acc(0);
      return static_cast<const Acc*>(view.data)[(at.first_channel + channel) * view.stride];
    };
    shared.skip[channel] = of_channel(p.D);
    shared.bias[channel] = of_channel(p.delta_bias);
  }
  __syncthreads();
}

}  // namespace ssm_kernels::selective_scan::sequential
