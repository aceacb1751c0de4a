// How a tile of the linear scan comes by the state that each of its threads begins with.
//
// What some consecutive steps do to a state is affine, h -> A h + B, or, if a sequence begins among them, h -> B whatever h was
// (a cut; no product with zero, which would let another sequence's NaN through). Where h is zero it is B too: A, the product of
// up to a tile of transitions, may have overflowed. (A state that is not zero is multiplied with it, and is right as long as
// the product of any of a tile's consecutive transitions is a finite number.) Affine maps compose:
//
// 1. each thread has that of its own steps, and leaves it in shared memory;
// 2. one thread for each channel obtains the state before the tile and applies to it the maps of the tile's segments, the steps
//    of one thread, in order;
// 3. each thread finds there the state before its own steps.
//
// Between tiles: the thread of a channel publishes the state after the tile, which the next tile of the chain reads. With few
// chains, tiles would wait long for each other. Then a tile publishes its map as soon as it has it, and the state after it once
// it has the state before. If its predecessor is not done, it applies the maps of the earlier tiles of its group, one after
// another, to the state after the group before: it comes by the same operations in the same order as the predecessor's, so that
// results are the same bits every time. A published value carries a tag in its own 64-bit word: neither fences nor flags are
// needed.
//
// Where tiles wait for each other, blocks take them as tickets, in order, one ahead of the one at work: of all tiles not yet
// done the first is being worked at, and waits for none.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/vector_io.cuh"
#include "linear_scan/cuda/launch.h"

namespace ssm_kernels::linear_scan {

// The geometry of a thread's part of a tile: kThreadSteps consecutive positions of kVector neighboring channels. In plain tiles
// all rows are moved as vectors and no sequence begins but with the first step, which keeps the code short: too long a loop
// waits for its instructions.
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

// h -> is_cut ? B : A h + B
template <typename Acc>
struct Map {
  Acc A = 1, B = 0;
  __device__ __forceinline__ Acc operator()(Acc h, bool is_cut) const {
    return is_cut || h == Acc(0) ? B : Math<Acc>::fma(A, h, B);
  }
  // This one after `first`.
  __device__ __forceinline__ Map after(const Map& first, bool is_cut) const {
    return is_cut ? *this : Map{A * first.A, (*this)(first.B, false)};
  }
};

// Values in 64-bit words of 32 bits each beside a tag that is not zero.
template <typename Acc>
struct TaggedWords {
  static constexpr int kWords = sizeof(Acc) / sizeof(uint32_t);
  static_assert(kWords == 1 || kWords == 2, "a value is cut into words of 32 bits");

  static __device__ __forceinline__ void publish(uint64_t* place, Acc value, uint32_t tag) {
    uint32_t halves[kWords];
    memcpy(halves, &value, sizeof(Acc));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint64_t word = static_cast<uint64_t>(tag) << 32 | halves[i];
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place + i), "l"(word) : "memory");
    }
  }

  // Reads once; is_there() says whether all of it had been published.
  uint64_t words[kWords];
  __device__ __forceinline__ void read(const uint64_t* place) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(place + i) : "memory");
    }
  }
  __device__ __forceinline__ bool is_there() const {
    bool result = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result &= (words[i] >> 32) != 0;
    return result;
  }
  __device__ __forceinline__ uint32_t tag() const { return static_cast<uint32_t>(words[0] >> 32); }
  __device__ __forceinline__ Acc value() const {
    uint32_t halves[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) halves[i] = static_cast<uint32_t>(words[i]);
    Acc result;
    memcpy(&result, halves, sizeof(Acc));
    return result;
  }
};

constexpr uint32_t kIsMap = 1, kIsCut = 2;

// A published map.
template <typename Acc>
struct PublishedMap {
  static constexpr int kWords = 2 * TaggedWords<Acc>::kWords;
  TaggedWords<Acc> A, B;
  static __device__ __forceinline__ void publish(uint64_t* place, const Map<Acc>& map, bool is_cut) {
    TaggedWords<Acc>::publish(place, map.A, is_cut ? kIsCut : kIsMap);
    TaggedWords<Acc>::publish(place + kWords / 2, map.B, is_cut ? kIsCut : kIsMap);
  }
  __device__ __forceinline__ void read(const uint64_t* place) {
    A.read(place);
    B.read(place + kWords / 2);
  }
  __device__ __forceinline__ bool is_there() const { return A.is_there() && B.is_there(); }
  __device__ __forceinline__ Map<Acc> map() const { return {A.value(), B.value()}; }
  __device__ __forceinline__ bool is_cut() const { return A.tag() == kIsCut; }
};

// Between tiles no barrier is needed: what a thread leaves here it finds changed, and no other uses it after the barriers.
template <typename T>
struct CarryShared {
  using Acc = typename T::Acc;
  Acc A[T::kSegments][kTileChannels];
  Acc B[T::kSegments][kTileChannels];  // then the states before the segments
  bool is_cut[T::kSegments];
  uint32_t tickets[2];
};

// The tiles that a block works at, one after another; the next is known while it works at one.
template <typename T>
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(const Partition& partition, CarryShared<T>& shared)
      : taken_(partition.taken), shared_(shared) {
    if (taken_ == nullptr) {
      current = blockIdx.x;
    } else {
      take(1);
      __syncthreads();
      current = shared.tickets[1];
    }
  }

  // The tile after the first. Later than the first, so that other blocks may have had theirs.
  __device__ __forceinline__ void take_second() {
    if (taken_ == nullptr) {
      next = current + gridDim.x;
    } else {
      take(0);
      __syncthreads();
      next = shared_.tickets[0];
    }
  }

  // Between begin() and end() of a tile lie the barriers of carry(). `slot` is 1, then 0, in turns.
  __device__ __forceinline__ void begin(int slot) {
    if (taken_ != nullptr) take(slot);
  }
  __device__ __forceinline__ void end(int slot) {
    current = next;
    next = taken_ == nullptr ? next + gridDim.x : shared_.tickets[slot];
  }

  uint32_t current, next;

 private:
  __device__ __forceinline__ void take(int slot) const {
    if (threadIdx.x == 0) shared_.tickets[slot] = atomicAdd(taken_, 1u);
  }

  uint32_t* taken_;
  CarryShared<T>& shared_;
};

// One channel of a tile among those that hand states on to each other.
template <typename T>
class Link {
 public:
  using Acc = typename T::Acc;
  using State = TaggedWords<Acc>;

  // Asks for the state after the tile before: likely it is there, and then it has come when it is needed.
  __device__ __forceinline__ Link(const Partition& partition, uint32_t index, uint32_t tile)
      : partition_(partition), index_(index), tile_(tile) {
    if (tile > 0 && threadIdx.x < kTileChannels) previous_.read(state_place(tile - 1));
  }

  // Whether tiles publish their maps.
  __device__ __forceinline__ bool has_maps() const { return partition_.tile_words != nullptr; }
  // Whether the state before the first tile is asked of it.
  __device__ __forceinline__ bool needs_initial() const { return tile_ < (has_maps() ? kGroupTiles : 1); }

  // What follows is called by the threads that stand for a channel.

  __device__ __forceinline__ Acc state_before(Acc initial) {
    if (tile_ == 0) return initial;
    while (!previous_.is_there()) previous_.read(state_place(tile_ - 1));
    return previous_.value();
  }
  __device__ __forceinline__ void publish_state_after(Acc state) const {
    if (!is_last()) State::publish(state_place(tile_), state, kIsMap);
  }

  // The same with few chains, given the tile's map; publishes the map and the state after it.
  __device__ __forceinline__ Acc state_before(const Map<Acc>& map, bool is_cut, Acc initial) {
    if (!is_last()) PublishedMap<Acc>::publish(map_place(tile_), map, is_cut);
    Acc state = initial;
    if (tile_ > 0) state = previous_.is_there() ? previous_.value() : wait(initial);
    publish_state_after(map(state, is_cut));
    return state;
  }

 private:
  __device__ __forceinline__ bool is_last() const { return tile_ + 1 == partition_.tiles; }

  __device__ __forceinline__ uint64_t* state_place(uint32_t tile) const {
    return partition_.state_words + place(tile) * State::kWords;
  }
  __device__ __forceinline__ uint64_t* map_place(uint32_t tile) const {
    return partition_.tile_words + place(tile) * PublishedMap<Acc>::kWords;
  }
  // Of a tile of the chain, up to this one.
  __device__ __forceinline__ int64_t place(uint32_t tile) const {
    const uint32_t index = index_ - (tile_ - tile) * partition_.chains.template value<uint32_t>();
    return int64_t(index) * kTileChannels + threadIdx.x;
  }

  __device__ __forceinline__ Acc wait(Acc initial) {
    const uint32_t first = tile_ / kGroupTiles * kGroupTiles;
    Map<Acc> earlier[kGroupTiles - 1];
    bool is_cut[kGroupTiles - 1];
    constexpr int kBatch = 3;
    static_assert((kGroupTiles - 1) % kBatch == 0, "the earlier tiles of a group are read in whole batches");
#pragma unroll
    for (int batch = 0; batch < kGroupTiles - 1; batch += kBatch) {
      PublishedMap<Acc> published[kBatch] = {};
      for (bool are_there = false; !are_there;) {
        are_there = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + batch + i < tile_ && !published[i].is_there()) {
            published[i].read(map_place(first + batch + i));
            are_there = false;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        earlier[batch + i] = published[i].map();
        is_cut[batch + i] = !T::kPlain && published[i].is_cut();
      }
    }
    State before_group;
    bool has_group = first == 0;
    while (!has_group) {
      before_group.read(state_place(first - 1));
      previous_.read(state_place(tile_ - 1));
      if (previous_.is_there()) return previous_.value();
      has_group = before_group.is_there();
    }
    Acc state = first == 0 ? initial : before_group.value();
#pragma unroll
    for (int i = 0; i < kGroupTiles - 1; ++i) {
      if (first + i < tile_) state = earlier[i](state, is_cut[i]);
    }
    return state;
  }

  const Partition& partition_;
  uint32_t index_, tile_;
  State previous_;
};

// Turns the maps of each thread's steps into the states before them. initial(channel) is the state before the first tile.
template <typename T, typename Initial>
__device__ __forceinline__ void carry(Link<T>& link, CarryShared<T>& shared, const Initial& initial,
                                      const Map<typename T::Acc> (&own)[T::kVector], bool own_is_cut,
                                      typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  const int own_segment = threadIdx.x / T::kLanes, first_channel = threadIdx.x % T::kLanes * T::kVector;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    shared.A[own_segment][first_channel + j] = own[j].A;
    shared.B[own_segment][first_channel + j] = own[j].B;
  }
  if (!T::kPlain) shared.is_cut[own_segment] = own_is_cut;
  __syncthreads();

  if (const int channel = threadIdx.x; channel < kTileChannels) {
    const auto segment = [&](int s) { return Map<Acc>{shared.A[s][channel], shared.B[s][channel]}; };
    const auto is_cut = [&](int s) { return !T::kPlain && shared.is_cut[s]; };
    const Acc at_first = link.needs_initial() ? initial(channel) : Acc(0);
    Acc h;
    if (link.has_maps()) {
      Map<Acc> tile = segment(0);
      bool tile_is_cut = is_cut(0);
#pragma unroll
      for (int s = 1; s < T::kSegments; ++s) {
        tile = segment(s).after(tile, is_cut(s));
        tile_is_cut |= is_cut(s);
      }
      h = link.state_before(tile, tile_is_cut, at_first);
    } else {
      h = link.state_before(at_first);
    }
#pragma unroll
    for (int s = 0; s < T::kSegments; ++s) {
      const Map<Acc> map = segment(s);
      shared.B[s][channel] = h;
      h = map(h, is_cut(s));
    }
    if (!link.has_maps()) link.publish_state_after(h);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) state[j] = shared.B[own_segment][first_channel + j];
}

}  // namespace ssm_kernels::linear_scan
