// How a tile of the linear scan comes by the state that each of its threads begins with.
//
// What some consecutive steps do to a state is affine, h -> A h + B, or, if a sequence begins among them, h -> B whatever h was
// (a cut; no product with zero, which would let another sequence's NaN through). Where h is zero it is B too: A, the product of
// up to a tile of transitions, may have overflowed. (A state that is not zero is multiplied with it, and is right as long as
// the product of any of a tile's consecutive transitions is a finite number.) Affine maps compose:
//
// 1. each thread has that of its own steps; a warp composes those of its threads by shuffles, in order;
// 2. the warps' maps meet in shared memory, and so does the state before the tile;
// 3. each thread applies to it the maps of the warps before its own, and then what its warp does before its own steps.
//
// Between tiles: the last steps' threads publish the state after the tile, which the next tile of the chain reads. With few
// chains, tiles would wait long for each other. Then a tile publishes its map as soon as it has it, composed by one thread for
// each channel, and the state after it once it has the state before. If its predecessor is not done, it applies the maps of the
// earlier tiles of its group, one after another, to the state after the group before: it comes by the same operations in the
// same order as the predecessor's, so that results are the same bits every time. A published value carries a tag in its own
// 64-bit word: neither fences nor flags are needed.
//
// Where tiles wait for each other, blocks take them as tickets, in order, one ahead of the one at work: of all tiles not yet
// done the first is being worked at, and waits for none.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/vector_io.cuh"
#include "linear_scan/linear_scan_cuda.h"

namespace ssm_kernels::linear_scan {

constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// The geometry of a thread's part of a tile: kThreadSteps consecutive positions of kVector neighboring channels. In plain tiles
// all rows are moved as vectors and no sequence begins but with the first step, which keeps the code short: too long a loop
// waits for its instructions.
template <typename Scalar_, int thread_steps, int tensors, bool is_plain>
struct Tile {
  using Scalar = Scalar_;
  static constexpr bool kPlain = is_plain;
  using Acc = cuda::AccumulateType<Scalar>;
  static constexpr int kThreadSteps = thread_steps;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kTensors = tensors;  // that pass through shared memory
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar));
  static constexpr int kLanes = kTileChannels / kVector;
  static constexpr int kSegmentsPerWarp = kWarpSize / kLanes;
  static constexpr int kSteps = tile_steps(sizeof(Scalar), thread_steps);
  static constexpr int kGroupTiles = group_tiles(sizeof(Acc));
  static_assert(kLanes <= kWarpSize, "a warp holds whole rows of the tile");
  static_assert(kWarps * kSegmentsPerWarp * kThreadSteps == kSteps, "the threads' steps fill the tile");
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
  __device__ __forceinline__ void wait(const uint64_t* place) {
    while (!A.is_there() || !B.is_there()) read(place);
  }
  __device__ __forceinline__ Map<Acc> map() const { return {A.value(), B.value()}; }
  __device__ __forceinline__ bool is_cut() const { return A.tag() == kIsCut; }
};

template <typename T>
struct CarryShared {
  using Acc = typename T::Acc;
  // Of the tile at work and of the one before it, which slower warps may still read.
  Acc A[2][T::kWarps][kTileChannels], B[2][T::kWarps][kTileChannels];
  bool is_cut[2][T::kWarps];
  Acc before_tile[2][kTileChannels];
  uint32_t tickets[2];
  // With few chains, the states before the warps.
  Acc before_warp[T::kWarps][kTileChannels];
  // The earlier tiles of the group, each channel's written and read by one thread.
  Map<Acc> earlier[T::kGroupTiles - 1][kTileChannels];
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

  // Between begin() and end() of a tile lie the barriers of carry().
  __device__ __forceinline__ void begin() {
    slot_ ^= 1;
    if (taken_ != nullptr) take(slot_);
  }
  __device__ __forceinline__ void end() {
    current = next;
    next = taken_ == nullptr ? next + gridDim.x : shared_.tickets[slot_];
  }

  uint32_t current, next;

 private:
  __device__ __forceinline__ void take(int slot) const {
    if (threadIdx.x == 0) shared_.tickets[slot] = atomicAdd(taken_, 1u);
  }

  uint32_t* taken_;
  CarryShared<T>& shared_;
  int slot_ = 0;
};

// One channel of a tile among those that hand states on to each other.
template <typename T>
class Link {
 public:
  using Acc = typename T::Acc;
  using State = TaggedWords<Acc>;

  // Asks for the state after the tile before: likely it is there, and then it has come when it is needed.
  __device__ __forceinline__ Link(const Partition& partition, uint32_t chain, uint32_t tile)
      : partition_(partition), chain_(chain), tile_(tile) {
    if (waits()) previous_.read(state_place(tile - 1, threadIdx.x));
  }

  // Whether the state before the first tile is asked of it.
  __device__ __forceinline__ bool needs_initial() const { return tile_ < T::kGroupTiles; }
  // Whether tiles publish their maps.
  __device__ __forceinline__ bool has_maps() const { return partition_.tile_words != nullptr; }
  __device__ __forceinline__ bool is_last() const { return tile_ + 1 == partition_.tiles; }

  // The state before the tile, of the thread's channel.
  __device__ __forceinline__ Acc state_before(Acc initial) {
    if (!waits()) return initial;
    while (!previous_.is_there()) previous_.read(state_place(tile_ - 1, threadIdx.x));
    return previous_.value();
  }
  __device__ __forceinline__ void publish_state_after(int channel, Acc state) const {
    State::publish(state_place(tile_, channel), state, kIsMap);
  }

  // The same with few chains, given the tile's map; publishes the map and the state after it.
  __device__ __forceinline__ Acc state_before(const Map<Acc>& map, bool is_cut, Acc initial, CarryShared<T>& shared) {
    if (!is_last()) PublishedMap<Acc>::publish(map_place(tile_), map, is_cut);
    Acc state = initial;
    if (waits()) state = previous_.is_there() ? previous_.value() : wait(initial, shared);
    if (!is_last()) publish_state_after(threadIdx.x, map(state, is_cut));
    return state;
  }

 private:
  __device__ __forceinline__ bool waits() const { return tile_ > 0 && threadIdx.x < kTileChannels; }

  __device__ __forceinline__ uint64_t* state_place(uint32_t tile, int channel) const {
    return partition_.state_words + place(tile, channel) * State::kWords;
  }
  __device__ __forceinline__ uint64_t* map_place(uint32_t tile) const {
    return partition_.tile_words + place(tile, threadIdx.x) * PublishedMap<Acc>::kWords;
  }
  __device__ __forceinline__ int64_t place(uint32_t tile, int channel) const {
    return (tile * partition_.chains.template value<int64_t>() + chain_) * kTileChannels + channel;
  }

  __device__ __forceinline__ Acc wait(Acc initial, CarryShared<T>& shared) {
    const int channel = threadIdx.x;
    const uint32_t first = tile_ / T::kGroupTiles * T::kGroupTiles;
    uint32_t cuts = 0;  // a bit for each of the earlier tiles
    constexpr int kBatch = 3;
    static_assert((T::kGroupTiles - 1) % kBatch == 0, "the earlier tiles of a group are read in whole batches");
    for (uint32_t tile = first; tile < tile_; tile += kBatch) {
      PublishedMap<Acc> published[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tile + i < tile_) published[i].read(map_place(tile + i));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tile + i >= tile_) continue;
        published[i].wait(map_place(tile + i));
        shared.earlier[tile + i - first][channel] = published[i].map();
        cuts |= uint32_t(published[i].is_cut()) << (tile + i - first);
      }
    }
    State before_group;
    bool has_group = first == 0;
    while (!has_group) {
      before_group.read(state_place(first - 1, channel));
      previous_.read(state_place(tile_ - 1, channel));
      if (previous_.is_there()) return previous_.value();
      has_group = before_group.is_there();
    }
    Acc state = first == 0 ? initial : before_group.value();
    for (uint32_t i = 0; i < tile_ - first; ++i) state = shared.earlier[i][channel](state, (cuts >> i & 1) != 0);
    return state;
  }

  const Partition& partition_;
  uint32_t chain_, tile_;
  State previous_;
};

// Turns the maps of each thread's steps into the states before them. initial(channel) is the state before the first tile;
// `parity` alternates from tile to tile.
template <typename T, typename Initial>
__device__ __forceinline__ void carry(Link<T>& link, CarryShared<T>& shared, int parity, const Initial& initial,
                                      const Map<typename T::Acc> (&own)[T::kVector], bool own_is_cut,
                                      typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first_channel = lane % T::kLanes * T::kVector;
  const bool is_last_segment = lane >= kWarpSize - T::kLanes;

  // From the warp's first step to the thread's last.
  Map<Acc> through[T::kVector];
  bool is_cut = !T::kPlain && own_is_cut;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) through[j] = own[j];
#pragma unroll
  for (int distance = T::kLanes; distance < kWarpSize; distance *= 2) {
    const bool earlier_is_cut = !T::kPlain && __shfl_up_sync(kWholeWarp, is_cut, distance);
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      const Map<Acc> earlier{__shfl_up_sync(kWholeWarp, through[j].A, distance),
                             __shfl_up_sync(kWholeWarp, through[j].B, distance)};
      if (lane >= distance) through[j] = through[j].after(earlier, is_cut);
    }
    if (!T::kPlain && lane >= distance) is_cut |= earlier_is_cut;
  }
  const auto map_of_warp = [&](int w, int channel) {
    return Map<Acc>{shared.A[parity][w][channel], shared.B[parity][w][channel]};
  };
  const auto warp_is_cut = [&](int w) { return !T::kPlain && shared.is_cut[parity][w]; };
  if (is_last_segment) {
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      shared.A[parity][warp][first_channel + j] = through[j].A;
      shared.B[parity][warp][first_channel + j] = through[j].B;
    }
    if (!T::kPlain) shared.is_cut[parity][warp] = is_cut;
  }

  const int channel = threadIdx.x;
  Acc before_warp[T::kVector];
  if (link.has_maps()) {
    __syncthreads();
    if (channel < kTileChannels) {
      Map<Acc> map;
      bool tile_is_cut = false;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        map = map_of_warp(w, channel).after(map, warp_is_cut(w));
        tile_is_cut |= warp_is_cut(w);
      }
      Acc h = link.state_before(map, tile_is_cut, link.needs_initial() ? initial(channel) : Acc(0), shared);
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        shared.before_warp[w][channel] = h;
        h = map_of_warp(w, channel)(h, warp_is_cut(w));
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) before_warp[j] = shared.before_warp[warp][first_channel + j];
  } else {
    if (channel < kTileChannels) {
      shared.before_tile[parity][channel] = link.state_before(link.needs_initial() ? initial(channel) : Acc(0));
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) before_warp[j] = shared.before_tile[parity][first_channel + j];
#pragma unroll 1
    for (int w = 0; w < warp; ++w) {
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) before_warp[j] = map_of_warp(w, first_channel + j)(before_warp[j], warp_is_cut(w));
    }
  }

#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    const Acc after = through[j](before_warp[j], is_cut);
    const Acc earlier = __shfl_up_sync(kWholeWarp, after, T::kLanes % kWarpSize);
    state[j] = lane < T::kLanes ? before_warp[j] : earlier;
    if (!link.has_maps() && !link.is_last() && warp == T::kWarps - 1 && is_last_segment) {
      link.publish_state_after(first_channel + j, after);
    }
  }
}

}  // namespace ssm_kernels::linear_scan
