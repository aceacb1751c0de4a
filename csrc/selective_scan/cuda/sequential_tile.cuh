// What forward and backward share on the device: tiles between global memory, registers and shared memory, and the lanes' view
// of them.
//
// The elements of a (batch, dim, seqlen) tensor's tile belong to threads by pieces of one vector, along the steps or along the
// channels, whichever lies together in memory; the same elements of all tensors belong to the same thread. Where they meet the
// lanes that walk through time they lie in shared memory in the accumulation type, the steps of a channel beside each other.
#pragma once

#include "cuda/ptx/named_barrier.cuh"
#include "selective_scan/cuda/device.cuh"
#include "selective_scan/cuda/sequential.h"

namespace ssm_kernels::selective_scan::sequential {

// How a block and its tile are cut; each kernel knows it when it is compiled.
template <typename Scalar_, int tile_steps>
struct TileConfig {
  using Scalar = Scalar_;
  using Acc = AccumulateType<Scalar>;
  static constexpr int kConsumers = kConsumerWarps * kWarpSize;  // threads
  static constexpr int kProducers = kProducerWarps * kWarpSize;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kWarpRows = kWarpSize / kStateLanes;  // channels of a warp that differ by lane
  static constexpr int kTileSteps = tile_steps;
  static_assert(chunk_length(kStates) % kTileSteps == 0, "a chunk is whole tiles, after one of which its state is saved");
};

// A walking thread's place in its block, with the channels and states that its registers hold. State lanes beside each other
// have states beside each other: they read rows of B and C in different banks.
//
// If permuted, which register holds which of a thread's channels depends on its state lane, and which of its states on its row:
// two lanes that exchange sums then keep and send the same registers.
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
    const int place = permuted ? k ^ (state_lane & 1) : k;
    return first_channel + place * TileConfig::kWarpRows;
  }
  __device__ __forceinline__ int state(int i) const {
    return state_lane + (permuted ? i ^ (row & (kLaneStates - 1)) : i) * kStateLanes;
  }
};

// visit(k, i, channel, state, whether they exist) for each of a walking thread's channels and states.
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

// Into (rows, dim, dstate).
template <typename ConsumerLane, typename Acc>
__device__ __forceinline__ void save_states(const SelectiveScanParams& p, const Position& at, const ConsumerLane& lane,
                                            const Acc (&values)[kLaneChannels][kLaneStates], void* array, int64_t row) {
  Acc* const target = static_cast<Acc*>(array) + state_offset(p, row, at.first_channel, 0);
  for_each_state(p, at, lane, [&](int k, int i, int channel, int state, bool exists) {
    if (exists) target[channel * static_cast<int>(p.dstate) + state] = values[k][i];
  });
}

// A tile in the accumulation type in shared memory. The groups of steps of a channel are swapped by exclusive or, so that the
// groups that lie in the same banks are not those of neighboring channels (which lanes read together), nor those of channels
// eight apart (which threads write together).
template <typename TileConfig>
struct TileArray {
  using Acc = typename TileConfig::Acc;
  static constexpr int kCapacity = kTileChannels * TileConfig::kTileSteps;

  Acc* data;

  __device__ __forceinline__ static int offset(int channel, int step) {
    constexpr int kGroups = TileConfig::kTileSteps / kGroupSteps, kSwapped = kGroups < 8 ? kGroups : 8,
                  kTogether = 8 / kSwapped;
    static_assert((kGroups & (kGroups - 1)) == 0 && kGroups <= 32, "groups are swapped by exclusive or");
    return channel * TileConfig::kTileSteps + (step ^ ((channel / kTogether + channel / 8) % kSwapped * kGroupSteps));
  }
  __device__ __forceinline__ Acc* at(int channel, int step) const { return data + offset(channel, step); }
};

// A vector of which the first `valid` elements exist, `stride` apart, together in memory if `is_vector`; the others are zeros.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> load_vector(const Scalar* place, int64_t stride, bool is_vector, int valid) {
  auto vector = Vector<Scalar, size>::zero();
  if (is_vector && valid == size) {
    vector = Vector<Scalar, size>::load_once(place);
  } else {
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if (j < valid) vector.set(j, place[j * stride]);
    }
  }
  return vector;
}

// By a whole walking warp: whether what its lanes read of a group of steps is finite.
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

// The elements of a tile that belong to a moving thread. Of a whole tile of tensors whose vectors lie together in memory they
// are kCount pieces of one vector each, along the steps or along the channels. Else the same elements are moved one by one.
template <typename TileConfig, bool along_channels>
struct ThreadVectors {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr int kCount = kTileChannels * TileConfig::kTileSteps / (kVector * TileConfig::kProducers);
  static constexpr int kPerRow = TileConfig::kTileSteps / kVector, kPerStep = kTileChannels / kVector;
  static constexpr int kRows = TileConfig::kProducers / kPerRow;    // channels between one piece and the next along the steps
  static constexpr int kSteps = TileConfig::kProducers / kPerStep;  // steps between one and the next along the channels
  static_assert(kCount * kVector * TileConfig::kProducers == kTileChannels * TileConfig::kTileSteps,
                "threads share a tile evenly");
  static_assert(kRows * kPerRow == TileConfig::kProducers && kSteps * kPerStep == TileConfig::kProducers,
                "a thread's pieces lie in one line");
  using Raw = Vector<Scalar, kVector>;
  // Of a piece's elements, how many are worked on at a time.
  static constexpr int kPart = kVector < kGroupSteps ? kVector : kGroupSteps;

  int thread;

  __device__ __forceinline__ int channel(int i) const {
    return along_channels ? thread % kPerStep * kVector : thread / kPerRow + i * kRows;
  }
  __device__ __forceinline__ int step(int i) const {
    return along_channels ? thread / kPerStep + i * kSteps : thread % kPerRow * kVector;
  }

  // The address of the first piece. `row` is that of the block's first channel.
  __device__ __forceinline__ Scalar* place(const SequenceView& view, Scalar* row, int64_t first_step) const {
    return row + (first_step + step(0)) * view.stride_step + channel(0) * view.stride_dim;
  }
  // From one piece to the next.
  __device__ __forceinline__ int64_t stride(const SequenceView& view) const {
    return along_channels ? kSteps * view.stride_step : kRows * view.stride_dim;
  }
  __device__ __forceinline__ Raw load(const SequenceView& view, Scalar* row, int64_t first_step, int i) const {
    return Raw::load_once(place(view, row, first_step) + i * stride(view));
  }
  // Into this thread's places of a stage in shared memory, `stage` the first of them; the copies are under way when it returns.
  __device__ __forceinline__ void copy(const SequenceView& view, const Scalar* first, Raw* stage) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cuda::cp_async(stage + i * TileConfig::kProducers, first + i * stride(view), kVectorBytes);
  }
  // Between `count` elements of piece i, from the element `first` on, and a tile in shared memory.
  template <int count>
  __device__ __forceinline__ void put(TileArray<TileConfig> tile, int i, int first, const Acc (&values)[count]) const {
    static_assert(count <= kGroupSteps, "a group of steps lies together");
    if constexpr (along_channels) {
#pragma unroll
      for (int j = 0; j < count; ++j) *tile.at(channel(i) + first + j, step(i)) = values[j];
    } else {
      Vector<Acc, count> group;
#pragma unroll
      for (int j = 0; j < count; ++j) group.set(j, values[j]);
      group.store(tile.at(channel(i), step(i) + first));
    }
  }
  template <int count>
  __device__ __forceinline__ void get(TileArray<TileConfig> tile, int i, int first, Acc (&values)[count]) const {
    static_assert(count <= kGroupSteps, "a group of steps lies together");
    if constexpr (along_channels) {
#pragma unroll
      for (int j = 0; j < count; ++j) values[j] = *tile.at(channel(i) + first + j, step(i));
    } else {
      const auto group = Vector<Acc, count>::load(tile.at(channel(i), step(i) + first));
#pragma unroll
      for (int j = 0; j < count; ++j) values[j] = group[j];
    }
  }
  // Of an array in shared memory with one value per channel.
  template <int count>
  __device__ __forceinline__ void of_channels(const Acc* array, int i, int first, Acc (&values)[count]) const {
    if constexpr (along_channels) {
      const auto vector = Vector<Acc, count>::load(array + channel(i) + first);
#pragma unroll
      for (int j = 0; j < count; ++j) values[j] = vector[j];
    } else {
      const Acc value = array[channel(i)];
#pragma unroll
      for (int j = 0; j < count; ++j) values[j] = value;
    }
  }
  template <int count>
  __device__ __forceinline__ static void widen(const Raw& raw, int first, Acc (&values)[count]) {
#pragma unroll
    for (int j = 0; j < count; ++j) values[j] = to_accumulate(raw[first + j]);
  }
  template <int count>
  __device__ __forceinline__ static void narrow(const Acc (&values)[count], int first, Raw& raw) {
#pragma unroll
    for (int j = 0; j < count; ++j) raw.set(first + j, from_accumulate<Scalar>(values[j]));
  }

  // visit(channel, step) for each element of a thread's pieces, one by one.
  template <typename Visitor>
  __device__ __forceinline__ void for_each_element(const Visitor& visit) const {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
#pragma unroll 2
      for (int j = 0; j < kVector; ++j) visit(channel(i) + (along_channels ? j : 0), step(i) + (along_channels ? 0 : j));
    }
  }
};

// Whether a block's tile that starts at t0 is moved by vectors.
template <typename TileConfig>
__device__ __forceinline__ bool has_vectors(const ScanPlan& plan, const Position& at, int64_t t0) {
  return plan.has_vectors && at.channels == kTileChannels && t0 + TileConfig::kTileSteps <= at.end;
}

// An element of a tile, zero if it does not exist. `row` is that of the block's first channel.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_element(const SequenceView& view, const Scalar* row, int channel,
                                                               int64_t step, bool exists) {
  return exists ? to_accumulate(row[channel * view.stride_dim + step * view.stride_step]) : AccumulateType<Scalar>(0);
}
template <typename Scalar>
__device__ __forceinline__ void store_element(const SequenceView& view, Scalar* row, int channel, int64_t step,
                                              AccumulateType<Scalar> value) {
  row[channel * view.stride_dim + step * view.stride_step] = from_accumulate<Scalar>(value);
}

// B and C at the steps of a tile, in shared memory: the steps of a state beside each other.
template <typename TileConfig>
struct Matrices {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr int kPitch = TileConfig::kTileSteps + kGroupSteps;
  static constexpr int kCapacity = kStates * kPitch;  // of one matrix
  static constexpr int kPerMatrix = kStates * TileConfig::kTileSteps / kVector;
  static constexpr int kCount = 2 * kPerMatrix / TileConfig::kProducers;
  static_assert(kPerMatrix % kWarpSize == 0, "a warp reads from one matrix at a time");
  static_assert(2 * kPerMatrix % TileConfig::kProducers == 0, "threads share the matrices evenly");
  using Raw = Vector<Scalar, kVector>;

  Acc *B, *C;

  // By threads that are numbered from Cut::kWalkers.
  __device__ __forceinline__ static int index(int i) {
    return i * TileConfig::kProducers + opaque(static_cast<int>(threadIdx.x)) - TileConfig::kConsumers;
  }
  __device__ __forceinline__ static bool is_B(int i) {
    if constexpr (kPerMatrix % TileConfig::kProducers == 0) return i < kPerMatrix / TileConfig::kProducers;
    return index(i) < kPerMatrix;
  }
  __device__ __forceinline__ static int state(int i, VectorAccess access) {
    const int vector_source = index(i) % kPerMatrix;
    return access == VectorAccess::kAlongChannels ? vector_source % (kStates / kVector) * kVector
                                                  : vector_source / (TileConfig::kTileSteps / kVector);
  }
  __device__ __forceinline__ static int step(int i, VectorAccess access) {
    const int vector_source = index(i) % kPerMatrix;
    return access == VectorAccess::kAlongChannels ? vector_source / (kStates / kVector)
                                                  : vector_source % (TileConfig::kTileSteps / kVector) * kVector;
  }

  // Where this thread's piece i begins at the first step.
  __device__ __forceinline__ static const Scalar* place(const SelectiveScanParams& p, const ScanPlan& plan, const Scalar* B_row,
                                                        const Scalar* C_row, int i) {
    const bool b = is_B(i);
    const VectorAccess access = b ? plan.B : plan.C;
    return (b ? B_row : C_row) + state(i, access) * (b ? p.B.stride_state : p.C.stride_state) +
           step(i, access) * (b ? p.B.stride_step : p.C.stride_step);
  }

  // visit(i, address, stride, access, valid) for each piece, of which `valid` elements exist, `stride` apart.
  template <typename Visitor>
  __device__ __forceinline__ static void for_each(const SelectiveScanParams& p, const ScanPlan& plan,
                                                  const Scalar* const (&places)[kCount], int64_t first_step, int steps,
                                                  const Visitor& visit) {
    const int states = static_cast<int>(p.dstate);
    const bool is_whole = steps == TileConfig::kTileSteps && states >= kStates;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool b = is_B(i);
      const VectorAccess access = b ? plan.B : plan.C;
      const int64_t stride_state = b ? p.B.stride_state : p.C.stride_state, stride_step = b ? p.B.stride_step : p.C.stride_step;
      const Scalar* const vector_source = places[i] + first_step * stride_step;
      const int n = state(i, access), t = step(i, access);
      const bool along_states = access == VectorAccess::kAlongChannels;
      int valid = kVector;
      if (!is_whole) {
        const int left = along_states ? states - n : steps - t;
        valid = n >= states || t >= steps ? 0 : left < kVector ? left : kVector;
      }
      visit(i, vector_source, along_states ? stride_state : stride_step, access, valid);
    }
  }

  // As Pieces::copy and Pieces::load, from the places of the pieces. States and steps that do not exist are zeros.
  __device__ __forceinline__ static void copy(const SelectiveScanParams& p, const ScanPlan& plan,
                                              const Scalar* const (&places)[kCount], int64_t first_step, int steps,
                                              Raw* stage) {
    for_each(p, plan, places, first_step, steps,
             [&](int i, const Scalar* vector_source, int64_t stride, VectorAccess access, int valid) {
               if (access != VectorAccess::kSingly && valid == kVector) {
                 cuda::cp_async(stage + i * TileConfig::kProducers, vector_source, kVectorBytes);
               } else {
                 stage[i * TileConfig::kProducers] = load_vector<Scalar, kVector>(vector_source, stride, false, valid);
               }
             });
  }
  __device__ __forceinline__ static void load(const SelectiveScanParams& p, const ScanPlan& plan,
                                              const Scalar* const (&places)[kCount], int64_t first_step, int steps,
                                              Raw (&raw)[kCount]) {
    for_each(p, plan, places, first_step, steps,
             [&](int i, const Scalar* vector_source, int64_t stride, VectorAccess access, int valid) {
               raw[i] = load_vector<Scalar, kVector>(vector_source, stride, access != VectorAccess::kSingly, valid);
             });
  }

  __device__ __forceinline__ void put(const ScanPlan& plan, const Raw* stage) const {
    Raw raw[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = stage[i * TileConfig::kProducers];
    put(plan, raw);
  }
  __device__ __forceinline__ void put(const ScanPlan& plan, const Raw (&raw)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const VectorAccess access = is_B(i) ? plan.B : plan.C;
      Acc* const place = (is_B(i) ? B : C) + state(i, access) * kPitch + step(i, access);
      if (access == VectorAccess::kAlongChannels) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) place[j * kPitch] = to_accumulate(raw[i][j]);
      } else {
        Vector<Acc, kVector> wide;
#pragma unroll
        for (int j = 0; j < kVector; ++j) wide.set(j, to_accumulate(raw[i][j]));
        wide.store(place);
      }
    }
  }
};

// Where the two roles meet, once a tile: what either has written to shared memory before, both see after.
template <typename TileConfig>
__device__ __forceinline__ void sync_roles() {
  constexpr int kBarrier = 1;
  cuda::barrier_sync(kBarrier, TileConfig::kThreads);
}

// A block's first lines: where it is, and what D and delta_bias are for its channels.
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
