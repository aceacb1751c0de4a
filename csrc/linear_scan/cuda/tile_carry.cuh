// The linear scan's carry: how each thread of a tile gets the state before its steps.
//
// Consecutive steps act on a state as an affine map (cuda/carry.cuh). Affine maps compose. In a tile:
//
// 1. each thread stores the map of its own steps, a segment, in shared memory;
// 2. two threads per channel fold the maps of half the segments each. In the place of each segment's map they leave the map of
//    the earlier segments of its half (the segment's prefix), and they publish the tile's map;
// 3. the same threads get the state before the tile by look-back, and store the states before both halves;
// 4. each thread applies its prefix to the state before its half.
//
// Look-back: the tiles of a chain form groups. A tile applies the maps of the earlier tiles of its group, one after another, to
// the state after the previous group, which the last tile of that group publishes. A tile publishes its map before it waits for
// any state, so a state crosses a group in one round trip through memory. The operations and their order do not depend on what
// is published when, so results have the same bits every time. With many chains a group is one tile, and no map is published.
//
// If tiles wait for each other, blocks take them by tickets, ahead of the tile they work at. A block finishes its tiles in the
// order of the tickets, so the first unfinished tile is always in progress and waits for none.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/carry.cuh"
#include "cuda/constants.h"
#include "cuda/vector_io.cuh"
#include "linear_scan/cuda/launch.h"

namespace ssm_kernels::linear_scan {

// Sizes of a tile at compile time. A thread has kThreadSteps consecutive positions of kVector neighboring channels.
template <typename Scalar_, int thread_steps, int tensors, TileRows tile_rows, bool is_forward>
struct Tile {
  using Scalar = Scalar_;
  static constexpr bool kPlain = tile_rows != TileRows::kAny;
  static constexpr bool kShifted = tile_rows == TileRows::kShifted;
  static constexpr bool kIsForward = is_forward;  // else a scan from the last step to the first
  using Acc = cuda::AccumulateType<Scalar>;
  static constexpr int kThreadSteps = thread_steps;
  static constexpr int kTensors = tensors;  // that pass through shared memory
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar));
  using Row = cuda::Vector<Scalar, kVector>;  // a thread's part of a row
  static constexpr int kLanes = kTileChannels / kVector;
  static constexpr int kSegments = kThreads / kLanes;
  static constexpr int kHalfSegments = kSegments / 2;
  static constexpr int kSteps = tile_steps(sizeof(Scalar), thread_steps);
  static_assert(kLanes * kSegments == kThreads && kSegments * kThreadSteps == kSteps, "the threads' steps fill the tile");
  static_assert(kThreads == 2 * kTileChannels && kSegments % 2 == 0,
                "two threads for each channel fold half the segments each");
};

using cuda::TaggedWords;
template <typename Acc>
using Map = cuda::AffineMap<Acc>;

// A published map: both values in one word. A decay of +0 is published as -0, which gives the same states but for the sign of
// zero, so that the decay's bits are zero in words that are not published. A signaling NaN, which no arithmetic returns, in
// place of the decay says that a sequence begins.
template <typename Acc>
struct PublishedMap {
  static constexpr int kWords = map_words_of(sizeof(Acc));
  static_assert(std::is_same_v<Acc, float> && kWords == 1, "two values fill a word");
  static constexpr uint32_t kIsReset = 0x7f800001, kMinusZero = 0x80000000;
  uint64_t word = 0x3f800000;  // the identity: decay 1, offset 0

  static __device__ __forceinline__ void publish(uint64_t* address, const Map<Acc>& map, bool is_reset) {
    uint32_t decay = is_reset ? kIsReset : __float_as_uint(map.decay);
    if (decay == 0) decay = kMinusZero;
    const uint64_t word = static_cast<uint64_t>(__float_as_uint(map.offset)) << 32 | decay;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
  }
  __device__ __forceinline__ void read(const uint64_t* address) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  }
  __device__ __forceinline__ bool is_published() const { return static_cast<uint32_t>(word) != 0; }
  __device__ __forceinline__ Map<Acc> map() const {
    return {__uint_as_float(static_cast<uint32_t>(word)), __uint_as_float(static_cast<uint32_t>(word >> 32))};
  }
  __device__ __forceinline__ bool is_reset() const { return static_cast<uint32_t>(word) == kIsReset; }
};

template <>
struct PublishedMap<double> {
  static constexpr int kWords = map_words_of(sizeof(double));
  static constexpr uint32_t kIsMap = 1, kIsReset = 2;
  static constexpr uint64_t kTag = uint64_t(kIsMap) << 32;
  TaggedWords<double> decay = {{kTag, kTag | 0x3ff00000}}, offset = {{kTag, kTag}};  // the identity

  static __device__ __forceinline__ void publish(uint64_t* address, const Map<double>& map, bool is_reset) {
    TaggedWords<double>::publish(address, map.decay, is_reset ? kIsReset : kIsMap);
    TaggedWords<double>::publish(address + kWords / 2, map.offset, is_reset ? kIsReset : kIsMap);
  }
  __device__ __forceinline__ void read(const uint64_t* address) {
    decay.read(address);
    offset.read(address + kWords / 2);
  }
  __device__ __forceinline__ bool is_published() const { return decay.is_published() && offset.is_published(); }
  __device__ __forceinline__ Map<double> map() const { return {decay.value(), offset.value()}; }
  __device__ __forceinline__ bool is_reset() const { return decay.tag() == kIsReset; }
};

// A thread's part in the carry: one of the tile's channels, and one half of the tile's segments and of the group's tiles. Both
// threads of a channel are in one warp.
struct CarryThread {
  static constexpr int kChannels = cuda::kWarpSize / 2;  // of a warp
  static __device__ __forceinline__ int half() { return threadIdx.x / kChannels % 2; }
  static __device__ __forceinline__ int channel() {
    return threadIdx.x / cuda::kWarpSize * kChannels + threadIdx.x % kChannels;
  }
  // The value of the thread of the same channel and of half `half`.
  template <typename Value>
  static __device__ __forceinline__ Value of_half(int half, Value value) {
    return __shfl_sync(cuda::kAllLanes, value, half * kChannels + threadIdx.x % kChannels);
  }
};

// The segments' maps, then their prefixes. A thread writes the map of its segment for its channels, and later reads the prefix
// from there.
template <typename T>
struct CarryShared {
  using Acc = typename T::Acc;
  // Half a warp reads each half: the second half's rows are in other banks.
  static constexpr int kHalfElements = T::kHalfSegments * kTileChannels + CarryThread::kChannels;
  Acc decay[2][kHalfElements], offset[2][kHalfElements];
  Acc states[2][kTileChannels];  // before each half of the tile
  bool is_reset[T::kSegments];
  uint32_t tickets[2];
};

// A carry thread's values of a tile: in half 0 the tile's map, in half 1 the map of the tile's first half.
template <typename T>
struct FoldedTile {
  Map<typename T::Acc> map;
  bool is_reset = false;
  bool prefix_is_reset = false;  // of the thread's own segment
};

// Folds the threads' maps. The prefixes are complete after the next barrier. The barrier inside separates earlier reads of
// shared.states from later writes.
template <typename T>
__device__ __forceinline__ FoldedTile<T> fold(CarryShared<T>& shared, const Map<typename T::Acc> (&own)[T::kVector],
                                              bool own_is_reset) {
  using Acc = typename T::Acc;
  const int own_segment = threadIdx.x / T::kLanes, own_half = own_segment / T::kHalfSegments;
  const int own_slot = own_segment % T::kHalfSegments * kTileChannels + threadIdx.x % T::kLanes * T::kVector;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    shared.decay[own_half][own_slot + j] = own[j].decay;
    shared.offset[own_half][own_slot + j] = own[j].offset;
  }
  if (!T::kPlain) shared.is_reset[own_segment] = own_is_reset;
  __syncthreads();

  FoldedTile<T> result;
  const int half = CarryThread::half(), channel = CarryThread::channel();
  Map<Acc> total;
#pragma unroll
  for (int s = 0; s < T::kHalfSegments; ++s) {
    Acc& decay = shared.decay[half][s * kTileChannels + channel];
    Acc& offset = shared.offset[half][s * kTileChannels + channel];
    const Map<Acc> map = {decay, offset};
    decay = total.decay;
    offset = total.offset;
    total = s == 0 ? map : map.after(total, !T::kPlain && shared.is_reset[half * T::kHalfSegments + s]);
  }
  [[maybe_unused]] bool half_is_reset[2] = {};
  if constexpr (!T::kPlain) {
#pragma unroll
    for (int s = 0; s < T::kHalfSegments; ++s) {
      half_is_reset[0] |= shared.is_reset[s];
      half_is_reset[1] |= shared.is_reset[T::kHalfSegments + s];
      const int segment = own_half * T::kHalfSegments + s;
      result.prefix_is_reset |= segment < own_segment && shared.is_reset[segment];
    }
    result.is_reset = half_is_reset[0] || (half == 0 && half_is_reset[1]);
  }
  const Map<Acc> other = {CarryThread::of_half(1 - half, total.decay), CarryThread::of_half(1 - half, total.offset)};
  result.map = half == 0 ? other.after(total, half_is_reset[1]) : other;
  return result;
}

// The maps that turn the states before the halves of a tile into the state before a thread's steps.
template <typename T>
struct Prefix {
  using Acc = typename T::Acc;
  Map<Acc> maps[T::kVector];

  // After a barrier since fold().
  __device__ __forceinline__ void read(const CarryShared<T>& shared) {
    const int slot = own_segment() % T::kHalfSegments * kTileChannels + own_channel();
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      maps[j] = {shared.decay[own_half()][slot + j], shared.offset[own_half()][slot + j]};
    }
  }
  // After a barrier since the states were stored.
  __device__ __forceinline__ void apply(const CarryShared<T>& shared, bool is_reset, Acc (&state)[T::kVector]) const {
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) state[j] = maps[j](shared.states[own_half()][own_channel() + j], is_reset);
  }

 private:
  static __device__ __forceinline__ int own_segment() { return threadIdx.x / T::kLanes; }
  static __device__ __forceinline__ int own_half() { return own_segment() / T::kHalfSegments; }
  static __device__ __forceinline__ int own_channel() { return threadIdx.x % T::kLanes * T::kVector; }
};

// The numbers of a block's tiles, one after another.
template <typename T>
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(const Partition& partition, CarryShared<T>& shared)
      : ticket_counter_(partition.ticket_counter), shared_(shared), last_(blockIdx.x - gridDim.x) {}

  // Starts to take a tile. pass(slot) passes its number to all threads, which get it from taken(slot) after a barrier. `slot`
  // alternates between 0 and 1. Two functions, because the first thread would wait for the ticket where it writes it.
  __device__ __forceinline__ void take() {
    if (ticket_counter_ != nullptr && threadIdx.x == 0) ticket_ = cuda::take_ticket(ticket_counter_);
  }
  __device__ __forceinline__ void pass(int slot) const {
    if (ticket_counter_ != nullptr && threadIdx.x == 0) shared_.tickets[slot] = ticket_;
  }
  __device__ __forceinline__ uint32_t taken(int slot) {
    last_ = ticket_counter_ == nullptr ? last_ + gridDim.x : shared_.tickets[slot];
    return last_;
  }
  __device__ __forceinline__ uint32_t take_now(int slot) {
    take();
    pass(slot);
    __syncthreads();
    return taken(slot);
  }

 private:
  uint32_t* ticket_counter_;
  CarryShared<T>& shared_;
  uint32_t last_;
  uint32_t ticket_ = 0;  // of the first thread
};

// Publishes a tile's map, unless no tile reads it. Nothing is published of tiles that do not exist.
template <typename T>
__device__ __forceinline__ void publish_map(const Partition& partition, uint32_t index, uint32_t tile,
                                            const FoldedTile<T>& folded) {
  using Published = PublishedMap<typename T::Acc>;
  const uint32_t last_of_group = (1u << partition.group_log2) - 1;
  const bool is_read = partition.map_words != nullptr && index < partition.tiles_in_all && tile + 1 < partition.tiles &&
                       (tile & last_of_group) != last_of_group;
  if (!is_read || CarryThread::half() != 0) return;
  const int64_t at = int64_t(index) * kTileChannels + CarryThread::channel();
  Published::publish(partition.map_words + at * Published::kWords, folded.map, folded.is_reset);
}

// The look-back of one tile.
template <typename T>
class LookBack {
 public:
  using Acc = typename T::Acc;

  // Starts to read the state after the previous group, which is likely published by now.
  __device__ __forceinline__ LookBack(const Partition& partition, uint32_t index, uint32_t tile)
      : partition_(partition), tile_(tile) {
    const auto chains = partition.chains.template value<uint32_t>();
    const uint32_t position = tile & ((1u << partition.group_log2) - 1), group = tile >> partition.group_log2;
    const uint32_t begin = CarryThread::half() * kHalfTiles;
    const int channel = CarryThread::channel();
    count_ = min(max(static_cast<int>(position - begin), 0), kHalfTiles);
    maps_at_ = partition.map_words + word<Published::kWords>(index - (position - begin) * chains, channel);
    stride_ = chains * (kTileChannels * Published::kWords);  // few chains have maps
    const uint32_t chain = index - tile * chains;
    state_at_ = partition.state_words + word<State::kWords>(group * chains + chain, channel);
    previous_state_at_ = state_at_ - word<State::kWords>(chains, 0);
    if (has_state()) state_.read(previous_state_at_);
  }

  // Waits for the state before the tile, stores the states before its halves in shared memory, and publishes the state after
  // the group if this is its last tile. initial(channel) is the state before the first tile.
  template <typename Initial>
  __device__ __forceinline__ void finish(CarryShared<T>& shared, const FoldedTile<T>& folded, const Initial& initial) {
    const int half = CarryThread::half(), channel = CarryThread::channel();
    Published maps[kHalfTiles];
    for (bool are_there = false; !are_there;) {
      are_there = true;
#pragma unroll
      for (int i = 0; i < kHalfTiles; ++i) {
        if (i < count_) maps[i].read(maps_at_ + i * stride_);
      }
#pragma unroll
      for (int i = 0; i < kHalfTiles; ++i) are_there &= maps[i].is_published();
    }
    Acc state = 0;
    if (has_state()) {
      while (!state_.is_published()) state_.read(previous_state_at_);
      state = state_.value();
    } else if (half == 0) {
      state = initial(channel);
    }
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (half == turn && count_ > 0) {
#pragma unroll
        for (int i = 0; i < kHalfTiles; ++i) state = maps[i].map()(state, !T::kPlain && maps[i].is_reset());
      }
      state = CarryThread::of_half(turn, state);
    }
    const uint32_t last_of_group = (1u << partition_.group_log2) - 1;
    if (half == 0 && (tile_ & last_of_group) == last_of_group && tile_ + 1 < partition_.tiles) {
      State::publish(state_at_, folded.map(state, folded.is_reset), 1);
    }
    shared.states[half][channel] = half == 0 ? state : folded.map(state, folded.is_reset);
  }

 private:
  using Published = PublishedMap<Acc>;
  using State = TaggedWords<Acc>;
  static_assert(State::kWords == state_words_of(sizeof(Acc)), "the host allocates as many words");
  static constexpr int kHalfTiles = 1 << (group_tiles_log2(sizeof(Acc)) - 1);

  // The index of a channel's first word. Rows of words have 32-bit numbers, as tiles do.
  template <int words>
  static __device__ __forceinline__ int64_t word(uint32_t row, int channel) {
    return int64_t(row) * (kTileChannels * words) + channel * words;
  }
  // Whether this thread reads the state after the previous group.
  __device__ __forceinline__ bool has_state() const { return CarryThread::half() == 0 && (tile_ >> partition_.group_log2) > 0; }

  const Partition& partition_;
  uint32_t tile_;
  int count_;  // maps of this thread's half of the group
  uint32_t stride_;
  const uint64_t* maps_at_;
  uint64_t *state_at_, *previous_state_at_;
  State state_;
};

}  // namespace ssm_kernels::linear_scan
