// The linear scan's carry: how each thread of a tile gets the state before its steps.
//
// Consecutive steps act on a state as an affine map (cuda/carry.cuh). Affine maps compose. In a tile:
//
// 1. each thread stores the map of its own steps, a segment, in shared memory;
// 2. one thread per channel gets the state before the tile and applies the maps of the segments in order;
// 3. each thread reads the state before its own steps.
//
// Between tiles: the thread of a channel publishes the state after its tile, and the next tile of the chain reads it. With few
// chains, tiles would wait long for each other. Then a tile also publishes its map (a decoupled look-back). A tile whose
// predecessor is not done applies the maps of the earlier tiles of its group, one after another, to the state after the
// previous group. These are the predecessor's operations in the predecessor's order, so results have the same bits every time.
//
// If tiles wait for each other, blocks take them by tickets, one ahead of the tile they work at. The first unfinished tile is
// therefore always in progress and waits for none.
#pragma once

#include <cstdint>

#include "cuda/carry.cuh"
#include "cuda/vector_io.cuh"
#include "linear_scan/cuda/launch.h"

namespace ssm_kernels::linear_scan {

// Sizes of a tile at compile time. A thread has kThreadSteps consecutive positions of kVector neighboring channels. In plain
// tiles all rows are vectors and a sequence begins with the first step only, without resets; the loop then fits into the
// instruction cache.
template <typename Scalar_, int thread_steps, int tensors, bool is_plain, bool is_forward>
struct Tile {
  using Scalar = Scalar_;
  static constexpr bool kPlain = is_plain;
  static constexpr bool kIsForward = is_forward;  // else a scan from the last step to the first
  using Acc = cuda::AccumulateType<Scalar>;
  static constexpr int kThreadSteps = thread_steps;
  static constexpr int kTensors = tensors;  // that pass through shared memory
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar));
  static constexpr int kLanes = kTileChannels / kVector;
  static constexpr int kSegments = kThreads / kLanes;
  static constexpr int kSteps = tile_steps(sizeof(Scalar), thread_steps);
  static_assert(kLanes * kSegments == kThreads && kSegments * kThreadSteps == kSteps, "the threads' steps fill the tile");
  static_assert(kThreads >= kTileChannels, "one thread for each channel obtains the state before the tile");
};

using cuda::TaggedWords;
template <typename Acc>
using Map = cuda::AffineMap<Acc>;

constexpr uint32_t kIsMap = 1, kIsReset = 2;

// A published map.
template <typename Acc>
struct PublishedMap {
  static constexpr int kWords = 2 * TaggedWords<Acc>::kWords;
  TaggedWords<Acc> decay, offset;
  static __device__ __forceinline__ void publish(uint64_t* address, const Map<Acc>& map, bool is_reset) {
    TaggedWords<Acc>::publish(address, map.decay, is_reset ? kIsReset : kIsMap);
    TaggedWords<Acc>::publish(address + kWords / 2, map.offset, is_reset ? kIsReset : kIsMap);
  }
  __device__ __forceinline__ void read(const uint64_t* address) {
    decay.read(address);
    offset.read(address + kWords / 2);
  }
  __device__ __forceinline__ bool is_published() const { return decay.is_published() && offset.is_published(); }
  __device__ __forceinline__ Map<Acc> map() const { return {decay.value(), offset.value()}; }
  __device__ __forceinline__ bool is_reset() const { return decay.tag() == kIsReset; }
};

// No barrier is needed between tiles: after carry()'s barriers each thread reads only its own column.
template <typename T>
struct CarryShared {
  using Acc = typename T::Acc;
  Acc decay[T::kSegments][kTileChannels];
  Acc offset[T::kSegments][kTileChannels];  // then the states before the segments
  bool is_reset[T::kSegments];
  uint32_t tickets[2];
};

// A block's tiles, one after another. The next tile is known while the block works at the current one.
template <typename T>
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(const Partition& partition, CarryShared<T>& shared)
      : ticket_counter_(partition.ticket_counter), shared_(shared) {
    if (ticket_counter_ == nullptr) {
      current = blockIdx.x;
    } else {
      take_ticket(1);
      __syncthreads();
      current = shared.tickets[1];
    }
  }

  // Takes the second tile, after other blocks could take their first.
  __device__ __forceinline__ void take_second() {
    if (ticket_counter_ == nullptr) {
      next = current + gridDim.x;
    } else {
      take_ticket(0);
      __syncthreads();
      next = shared_.tickets[0];
    }
  }

  // carry()'s barriers separate begin() and end() of a tile. `slot` alternates between 1 and 0.
  __device__ __forceinline__ void begin(int slot) {
    if (ticket_counter_ != nullptr) take_ticket(slot);
  }
  __device__ __forceinline__ void end(int slot) {
    current = next;
    next = ticket_counter_ == nullptr ? next + gridDim.x : shared_.tickets[slot];
  }

  uint32_t current, next;

 private:
  __device__ __forceinline__ void take_ticket(int slot) const {
    if (threadIdx.x == 0) shared_.tickets[slot] = cuda::take_ticket(ticket_counter_);
  }

  uint32_t* ticket_counter_;
  CarryShared<T>& shared_;
};

// The carry of one channel between the tiles of a chain.
template <typename T>
class LookBack {
 public:
  using Acc = typename T::Acc;
  using State = TaggedWords<Acc>;

  // Starts reading the state after the previous tile, which is likely published by now.
  __device__ __forceinline__ LookBack(const Partition& partition, uint32_t index, uint32_t tile)
      : partition_(partition), index_(index), tile_(tile) {
    if (tile > 0 && threadIdx.x < kTileChannels) previous_.read(state_address(tile - 1));
  }

  // Whether tiles publish their maps.
  __device__ __forceinline__ bool has_maps() const { return partition_.tile_words != nullptr; }
  // Whether state_before() may need the initial state.
  __device__ __forceinline__ bool needs_initial() const { return tile_ < (has_maps() ? kGroupTiles : 1); }

  // The functions below are called by one thread per channel.

  __device__ __forceinline__ Acc state_before(Acc initial) {
    if (tile_ == 0) return initial;
    while (!previous_.is_published()) previous_.read(state_address(tile_ - 1));
    return previous_.value();
  }
  __device__ __forceinline__ void publish_state_after(Acc state) const {
    if (!is_last()) State::publish(state_address(tile_), state, kIsMap);
  }

  // With few chains: also publishes the tile's map and the state after the tile.
  __device__ __forceinline__ Acc state_before(const Map<Acc>& map, bool is_reset, Acc initial) {
    if (!is_last()) PublishedMap<Acc>::publish(map_address(tile_), map, is_reset);
    Acc state = initial;
    if (tile_ > 0) state = previous_.is_published() ? previous_.value() : wait(initial);
    publish_state_after(map(state, is_reset));
    return state;
  }

 private:
  __device__ __forceinline__ bool is_last() const { return tile_ + 1 == partition_.tiles; }

  __device__ __forceinline__ uint64_t* state_address(uint32_t tile) const {
    return partition_.state_words + word_index(tile) * State::kWords;
  }
  __device__ __forceinline__ uint64_t* map_address(uint32_t tile) const {
    return partition_.tile_words + word_index(tile) * PublishedMap<Acc>::kWords;
  }
  // The index of this channel in an earlier tile of the chain.
  __device__ __forceinline__ int64_t word_index(uint32_t tile) const {
    const uint32_t index = index_ - (tile_ - tile) * partition_.chains.template value<uint32_t>();
    return int64_t(index) * kTileChannels + threadIdx.x;
  }

  __device__ __forceinline__ Acc wait(Acc initial) {
    const uint32_t first = tile_ / kGroupTiles * kGroupTiles;
    Map<Acc> earlier[kGroupTiles - 1];
    bool is_reset[kGroupTiles - 1];
    constexpr int kBatch = 3;
    static_assert((kGroupTiles - 1) % kBatch == 0, "the earlier tiles of a group are read in whole batches");
#pragma unroll
    for (int batch = 0; batch < kGroupTiles - 1; batch += kBatch) {
      PublishedMap<Acc> published[kBatch] = {};
      for (bool are_there = false; !are_there;) {
        are_there = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + batch + i < tile_ && !published[i].is_published()) {
            published[i].read(map_address(first + batch + i));
            are_there = false;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        earlier[batch + i] = published[i].map();
        is_reset[batch + i] = !T::kPlain && published[i].is_reset();
      }
    }
    State before_group;
    bool has_group = first == 0;
    while (!has_group) {
      before_group.read(state_address(first - 1));
      previous_.read(state_address(tile_ - 1));
      if (previous_.is_published()) return previous_.value();
      has_group = before_group.is_published();
    }
    Acc state = first == 0 ? initial : before_group.value();
#pragma unroll
    for (int i = 0; i < kGroupTiles - 1; ++i) {
      if (first + i < tile_) state = earlier[i](state, is_reset[i]);
    }
    return state;
  }

  const Partition& partition_;
  uint32_t index_, tile_;
  State previous_;
};

// Turns each thread's map into the state before its steps. initial(channel) is the state before the first tile.
template <typename T, typename Initial>
__device__ __forceinline__ void carry(LookBack<T>& look_back, CarryShared<T>& shared, const Initial& initial,
                                      const Map<typename T::Acc> (&own)[T::kVector], bool own_is_reset,
                                      typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  const int own_segment = threadIdx.x / T::kLanes, first_channel = threadIdx.x % T::kLanes * T::kVector;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    shared.decay[own_segment][first_channel + j] = own[j].decay;
    shared.offset[own_segment][first_channel + j] = own[j].offset;
  }
  if (!T::kPlain) shared.is_reset[own_segment] = own_is_reset;
  __syncthreads();

  if (const int channel = threadIdx.x; channel < kTileChannels) {
    const auto segment = [&](int s) { return Map<Acc>{shared.decay[s][channel], shared.offset[s][channel]}; };
    const auto is_reset = [&](int s) { return !T::kPlain && shared.is_reset[s]; };
    const Acc at_first = look_back.needs_initial() ? initial(channel) : Acc(0);
    Acc h;
    if (look_back.has_maps()) {
      Map<Acc> tile = segment(0);
      bool tile_is_reset = is_reset(0);
#pragma unroll
      for (int s = 1; s < T::kSegments; ++s) {
        tile = segment(s).after(tile, is_reset(s));
        tile_is_reset |= is_reset(s);
      }
      h = look_back.state_before(tile, tile_is_reset, at_first);
    } else {
      h = look_back.state_before(at_first);
    }
#pragma unroll
    for (int s = 0; s < T::kSegments; ++s) {
      const Map<Acc> map = segment(s);
      shared.offset[s][channel] = h;
      h = map(h, is_reset(s));
    }
    if (!look_back.has_maps()) look_back.publish_state_after(h);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) state[j] = shared.offset[own_segment][first_channel + j];
}

}  // namespace ssm_kernels::linear_scan
