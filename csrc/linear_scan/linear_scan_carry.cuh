// How a tile of the linear scan comes by the state that each of its threads begins with.
//
// What some consecutive steps do to a state is affine, h -> A h + B, or, if a sequence begins among them, h -> B whatever h was
// (a cut; no product with zero, which would let another sequence's NaN through). Affine maps compose:
//
// 1. each thread has that of its own steps; a warp composes those of its threads by shuffles, in order;
// 2. the warps' maps meet in shared memory, where one thread for each channel composes them to the tile's;
// 3. that thread obtains the state before the tile, and leaves for each warp the state before it;
// 4. each thread applies what its warp does before its own steps.
//
// Between tiles: a tile publishes its map. To find the state before it, it composes the maps of the earlier tiles of its group
// with the state before the group, which the last tile of the group before publishes. All of this is a fixed order of
// operations, whatever the blocks' timing: results are the same bits every time. Blocks wait only for blocks of smaller index,
// which the hardware starts first. A published value carries a tag in its own 64-bit word, so neither fences nor flags are
// needed.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/vector_io.cuh"
#include "linear_scan/linear_scan_cuda.h"

namespace ssm_kernels::linear_scan {

constexpr int kWarpSize = 32;
constexpr int kWarps = kTileThreads / kWarpSize;
constexpr unsigned kWholeWarp = 0xffffffffu;

// The geometry of a thread's part of a tile.
template <typename Scalar_, int tensors>
struct Tile {
  using Scalar = Scalar_;
  static constexpr int kTensors = tensors;  // that it keeps in shared memory
  using Acc = cuda::AccumulateType<Scalar>;
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(Scalar));
  static constexpr int kLanes = kTileChannels / kVector;
  static constexpr int kSegmentsPerWarp = kWarpSize / kLanes;
  static constexpr int kSteps = thread_steps(tensors);
  static constexpr int kTileSteps = tile_steps(sizeof(Scalar), tensors);
  static_assert(kLanes <= kWarpSize, "a warp holds whole rows of the tile");
  static_assert(kWarps * kSegmentsPerWarp * kSteps == kTileSteps, "the threads' steps fill the tile");
};

// h -> is_cut ? B : A h + B
template <typename Acc>
struct Map {
  Acc A = 1, B = 0;
  __device__ __forceinline__ Acc operator()(Acc h, bool is_cut) const { return is_cut ? B : Math<Acc>::fma(A, h, B); }
  // This one after `first`.
  __device__ __forceinline__ Map after(const Map& first, bool is_cut) const {
    return is_cut ? *this : Map{A * first.A, Math<Acc>::fma(A, first.B, B)};
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

template <typename Acc>
struct CarryShared {
  Acc A[kWarps][kTileChannels], B[kWarps][kTileChannels];
  Acc state[kWarps][kTileChannels];
  bool is_cut[kWarps];
};

// The state before the tile, of one channel, whose map is given; publishes what later tiles wait for.
template <typename Acc>
__device__ __forceinline__ Acc state_before_tile(const Partition& partition, int64_t chain, int64_t tile, int channel,
                                                 const Map<Acc>& map, bool is_cut) {
  if (partition.tiles == 1) return 0;
  constexpr int kMapWords = PublishedMap<Acc>::kWords, kStateWords = TaggedWords<Acc>::kWords;
  const auto map_place = [&](int64_t of) {
    return partition.tile_words + ((of * partition.chains + chain) * kTileChannels + channel) * kMapWords;
  };
  const auto state_place = [&](int64_t group) {
    return partition.state_words + ((group * partition.chains + chain) * kTileChannels + channel) * kStateWords;
  };
  const int64_t group = tile / kGroupTiles, first = group * kGroupTiles;
  const bool ends_group = tile == first + kGroupTiles - 1;
  if (!ends_group) PublishedMap<Acc>::publish(map_place(tile), map, is_cut);

  Map<Acc> before;
  bool before_is_cut = false;
  constexpr int kBatch = 5;
  static_assert((kGroupTiles - 1) % kBatch == 0, "the earlier tiles of a group are read in whole batches");
  for (int64_t of = first; of < tile; of += kBatch) {
    PublishedMap<Acc> published[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (of + i < tile) published[i].read(map_place(of + i));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (of + i >= tile) continue;
      published[i].wait(map_place(of + i));
      before = published[i].map().after(before, published[i].is_cut());
      before_is_cut |= published[i].is_cut();
    }
  }
  Acc state = 0;  // before the first step, where every sequence cuts
  if (group > 0) {
    TaggedWords<Acc> published;
    do published.read(state_place(group - 1));
    while (!published.is_there());
    state = published.value();
  }
  state = before(state, before_is_cut);
  if (ends_group) TaggedWords<Acc>::publish(state_place(group), map(state, is_cut), kIsMap);
  return state;
}

// Turns the maps of each thread's steps into the states before them.
template <typename T>
__device__ __forceinline__ void carry(const Partition& partition, int64_t chain, int64_t tile,
                                      CarryShared<typename T::Acc>& shared, const Map<typename T::Acc> (&own)[T::kVector],
                                      bool own_is_cut, typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first_channel = lane % T::kLanes * T::kVector;

  // From the warp's first step to the thread's last, and to the thread's first.
  Map<Acc> through[T::kVector], before[T::kVector];
  bool through_is_cut = own_is_cut;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) through[j] = own[j];
#pragma unroll
  for (int distance = T::kLanes; distance < kWarpSize; distance *= 2) {
    const bool earlier_is_cut = __shfl_up_sync(kWholeWarp, through_is_cut, distance);
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      const Map<Acc> earlier{__shfl_up_sync(kWholeWarp, through[j].A, distance),
                             __shfl_up_sync(kWholeWarp, through[j].B, distance)};
      if (lane >= distance) through[j] = through[j].after(earlier, through_is_cut);
    }
    if (lane >= distance) through_is_cut |= earlier_is_cut;
  }
  bool before_is_cut = false;
  if constexpr (T::kSegmentsPerWarp > 1) {
    const bool is_first = lane < T::kLanes;
    before_is_cut = __shfl_up_sync(kWholeWarp, through_is_cut, T::kLanes) && !is_first;
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      before[j] = {__shfl_up_sync(kWholeWarp, through[j].A, T::kLanes), __shfl_up_sync(kWholeWarp, through[j].B, T::kLanes)};
      if (is_first) before[j] = {};
    }
  }
  if (lane >= kWarpSize - T::kLanes) {
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      shared.A[warp][first_channel + j] = through[j].A;
      shared.B[warp][first_channel + j] = through[j].B;
    }
    shared.is_cut[warp] = through_is_cut;
  }
  __syncthreads();

  if (const int channel = threadIdx.x; channel < kTileChannels) {
    Map<Acc> map;
    bool is_cut = false;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      map = Map<Acc>{shared.A[w][channel], shared.B[w][channel]}.after(map, shared.is_cut[w]);
      is_cut |= shared.is_cut[w];
    }
    Acc h = state_before_tile(partition, chain, tile, channel, map, is_cut);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      shared.state[w][channel] = h;
      h = Map<Acc>{shared.A[w][channel], shared.B[w][channel]}(h, shared.is_cut[w]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) state[j] = before[j](shared.state[warp][first_channel + j], before_is_cut);
}

}  // namespace ssm_kernels::linear_scan
