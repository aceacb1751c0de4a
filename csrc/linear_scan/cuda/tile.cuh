// Device code of the linear scan's forward, backward and summary: a thread's part of a tile, its rows of the tensors, the
// pipeline through shared memory, and launches.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/pdl.cuh"
#include "linear_scan/cuda/any_recurrence.cuh"
#include "linear_scan/cuda/shifted_rows.cuh"
#include "linear_scan/cuda/tile_carry.cuh"

namespace ssm_kernels::linear_scan {

// A thread's part of a tile.
template <typename T>
struct ThreadTile {
  uint32_t index;  // the tile's number
  uint32_t tile;   // its number in the chain
  int64_t batch;
  int64_t first;    // step
  int64_t channel;  // its first
  int channels;     // that exist, up to kVector, or, to the end of the row, to kMostChannels
  int steps;        // that exist, up to T::kThreadSteps; in plain tiles none without channels, unless rows are shifted

  __device__ __forceinline__ ThreadTile(const LinearScanParams& p, const Partition& partition, uint32_t index)
      : index(index), tile(partition.chains.divide(index)) {
    const uint32_t chain = index - tile * partition.chains.value<uint32_t>();
    const uint32_t row = partition.channel_blocks.divide(chain);
    const uint32_t block = chain - row * partition.channel_blocks.value<uint32_t>();
    const uint32_t segment = threadIdx.x / T::kLanes, lane = threadIdx.x % T::kLanes;
    const int64_t position = int64_t(tile) * T::kSteps + segment * T::kThreadSteps;
    batch = row;
    first = T::kIsForward ? position : p.seqlen - 1 - position;
    channel = int64_t(block) * kTileChannels + lane * T::kVector;
    channels = T::kPlain && !T::kShifted ? T::kVector : count(p.channels - channel, kMostChannels);
    const bool exists = index < partition.tiles_in_all && (!T::kPlain || T::kShifted || channel < p.channels);
    steps = exists ? count(p.seqlen - position, T::kThreadSteps) : 0;
  }

  // In a block that does not take tiles by number: `steps` are left from `first` on.
  __device__ __forceinline__ ThreadTile(const LinearScanParams& p, int64_t batch, int64_t first, int64_t steps, int64_t channel)
      : index(0),
        tile(0),
        batch(batch),
        first(first),
        channel(channel),
        channels(T::kPlain ? T::kVector : count(p.channels - channel, kMostChannels)),
        steps(T::kPlain && channel >= p.channels ? 0 : count(steps, T::kThreadSteps)) {}

  __device__ __forceinline__ int64_t step(int s) const { return T::kIsForward ? first + s : first - s; }
  // A shifted vector of a row that goes on is loaded as aligned pieces, which extend beyond it.
  static constexpr int kMostChannels = T::kPlain ? T::kVector : 2 * T::kVector;

  // `left`, clamped to 0 ... `most`.
  static __device__ __forceinline__ int count(int64_t left, int most) {
    return left >= most ? most : max(static_cast<int>(left), 0);
  }

  // A state's element for one of the tile's kTileChannels channels; zero if there is none.
  __device__ __forceinline__ typename T::Acc element(const StateView& view, const LinearScanParams& p, int tile_channel) const {
    const int64_t c = channel - threadIdx.x % T::kLanes * T::kVector + tile_channel;
    if (view.data == nullptr || c >= p.channels) return 0;
    return static_cast<const typename T::Acc*>(view.data)[batch * view.stride_sequence + c * view.stride_channel];
  }
};

// A thread's rows of a tensor, one after another: those of its steps, or of the steps `earlier` steps before them. Each
// function moves on to the next row. Addresses advance, because 64-bit multiples of strides would cost as much as the scan.
template <typename T>
struct Rows {
  using Scalar = typename T::Scalar;
  static constexpr int kVector = T::kVector;

  const SequenceView* view;
  char* row;
  int64_t stride;  // in bytes
  int channels;
  bool vectors;

  Rows() = default;
  __device__ __forceinline__ Rows(const SequenceView& view, const Partition& partition, int bit, const ThreadTile<T>& at,
                                  int earlier = 0, int element_bytes = sizeof(Scalar))
      : view(&view),
        channels(at.channels),
        vectors(T::kPlain ? !T::kShifted : ((partition.vector_views >> bit & 1) != 0 && at.channels > 0)) {
    const int64_t element = at.batch * view.stride_batch + (at.first - earlier) * view.stride_step +
                            (T::kPlain ? at.channel : at.channel * view.stride_channel);
    row = static_cast<char*>(view.data) + element * element_bytes;
    stride = (T::kIsForward ? view.stride_step : -view.stride_step) * element_bytes;
  }

  // Missing elements are zero.
  template <typename Element>
  __device__ __forceinline__ cuda::Vector<Element, kVector> load_next(bool exists) {
    using Vector = cuda::Vector<Element, kVector>;
    Vector result = Vector::zero();
    const auto* const source = reinterpret_cast<const Element*>(row);
    if (exists && vectors) {
      result = Vector::load(source);
    } else if constexpr (!T::kPlain || T::kShifted) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (exists && j < channels) result.set(j, source[j * view->stride_channel]);
      }
    }
    row += stride;
    return result;
  }

  // The same for rows that are no vectors.
  __device__ __forceinline__ cuda::Vector<Scalar, kVector> load_next_shifted(bool exists) {
    if constexpr (sizeof(Scalar) <= kWordBytes) {
      if (view->stride_channel == 1) {
        const cuda::ShiftedLoad<Scalar, kVector> loaded(reinterpret_cast<const Scalar*>(row), exists ? channels : 0);
        row += stride;
        return loaded.vector();
      }
    }
    return load_next<Scalar>(exists);
  }

  __device__ __forceinline__ cuda::Vector<Scalar, kVector> load_row(bool exists) {
    return T::kPlain || vectors ? load_next<Scalar>(exists) : load_next_shifted(exists);
  }

  // Copies a row to shared memory, asynchronously if it is a vector. A row that does not exist is zero.
  __device__ __forceinline__ void stage_next(bool exists, cuda::Vector<Scalar, kVector>* target) {
    if (vectors) {
      cuda::cp_async(target, row, exists ? cuda::kCpAsyncBytes : 0);
      row += stride;
    } else if constexpr (!T::kPlain) {
      *target = load_next_shifted(exists);
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store_next(bool exists, const cuda::Vector<Element, kVector>& values) {
    auto* const target = reinterpret_cast<Element*>(row);
    if (exists && vectors) {
      values.store_once(target);
    } else if constexpr (!T::kPlain || T::kShifted) {
      if constexpr (!T::kPlain && sizeof(Element) <= kWordBytes) {
        if (exists && view->stride_channel == 1) {
          cuda::store_shifted(target, values, channels);
          row += stride;
          return;
        }
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (exists && j < channels) target[j * view->stride_channel] = values[j];
      }
    }
    row += stride;
  }
};

// A block's shared memory: two buffers for tiles, and the carry's arrays. A thread reads only the rows that it copied, or, of
// shifted rows, those that it moved.
template <typename T>
struct Shared {
  using Row = typename T::Row;
  Row rows[2][T::kTensors][T::kThreadSteps][kThreads];
  CarryShared<T> carry;
  static constexpr bool kHasLast = T::kShifted && sizeof(typename T::Scalar) < kWordBytes;
  uint32_t last[kHasLast ? 2 * T::kTensors : 1][kHasLast ? T::kSegments : 1][kHasLast ? T::kThreadSteps : 1];  // RingRows's
};

// A thread's shifted rows of the first `tensors` tensors of a tile. view(i) is tensor i, with `data` of the row that a thread's
// first step reads.
template <typename T, int tensors, typename View>
struct ShiftedTile {
  using Scalar = typename T::Scalar;
  using Ring = RingRows<Scalar, T::kThreadSteps, T::kLanes, kThreads * kVectorBytes>;
  using Stores = ShiftedStores<Scalar>;
  static_assert(cuda::kWarpSize % T::kLanes == 0, "the lanes of a row are in one warp");
  static_assert(T::kThreadSteps % 2 == 0, "the first rows of all threads start equally far from pairs");

  Shared<T>& shared;
  const LinearScanParams& p;
  const View& view;

  // Starts the copies; tensor i has steps(i) rows.
  template <typename Steps>
  __device__ __forceinline__ void copy(const ThreadTile<T>& at, int buffer, const Steps& steps) const {
#pragma unroll 1
    for (int i = 0; i < tensors; ++i) {
      const SequenceView of = view(i);
      Ring::copy(first(of, at), stride(of), channels(at), steps(i), lane(), rows(buffer, i), last(buffer, i));
    }
  }
  // Moves the elements of copied rows to where aligned rows have them.
  __device__ __forceinline__ void shift(const ThreadTile<T>& at, int buffer) const {
#pragma unroll 1
    for (int i = 0; i < tensors; ++i) {
      const SequenceView of = view(i);
      Ring::shift(first(of, at), stride(of), lane(), rows(buffer, i), last(buffer, i));
    }
  }
  // Stores the results of a warp, which are in the place of a tensor's rows. A warp has consecutive rows.
  __device__ __forceinline__ void store(const ThreadTile<T>& at, int buffer, int tensor, const SequenceView& to) const {
    constexpr int kSegmentsOfWarp = cuda::kWarpSize / T::kLanes;
    const int lane_of_warp = static_cast<int>(threadIdx.x) % cuda::kWarpSize;
    const int skipped = lane_of_warp / T::kLanes * T::kThreadSteps;  // rows of earlier threads of the warp
    const int64_t position = (T::kIsForward ? at.first : p.seqlen - 1 - at.first) - skipped;
    const int count = ThreadTile<T>::count(p.seqlen - position, kSegmentsOfWarp * T::kThreadSteps);
    Stores out(const_cast<Scalar*>(first(to, at)) - skipped * stride(to), stride(to), channels(at), count, lane_of_warp);
    const auto* source = reinterpret_cast<const Scalar*>(&shared.rows[buffer][tensor][0][threadIdx.x - lane_of_warp]) +
                         lane_of_warp * Stores::Pair::kSize;
#pragma unroll 1
    for (int segment = 0; segment < kSegmentsOfWarp; ++segment) {
      typename Stores::Pair pairs[T::kThreadSteps];
      uint32_t before[T::kThreadSteps];
#pragma unroll
      for (int s = 0; s < T::kThreadSteps; ++s) pairs[s] = Stores::Pair::load(source + s * kThreads * T::kVector);
#pragma unroll
      for (int s = 0; s < T::kThreadSteps; ++s) before[s] = out.before(pairs[s]);
#pragma unroll
      for (int s = 0; s < T::kThreadSteps; ++s) {
        out.store_next(s % 2, segment * T::kThreadSteps + s, pairs[s], before[s]);
      }
      source += kTileChannels;
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % T::kLanes; }
  static __device__ __forceinline__ int64_t block_channel(const ThreadTile<T>& at) { return at.channel - lane() * T::kVector; }
  __device__ __forceinline__ int channels(const ThreadTile<T>& at) const {
    return ThreadTile<T>::count(p.channels - block_channel(at), kTileChannels);
  }
  static __device__ __forceinline__ int64_t stride(const SequenceView& of) {
    return T::kIsForward ? of.stride_step : -of.stride_step;
  }
  static __device__ __forceinline__ const Scalar* first(const SequenceView& of, const ThreadTile<T>& at) {
    return static_cast<const Scalar*>(of.data) + at.batch * of.stride_batch + at.first * of.stride_step + block_channel(at);
  }
  __device__ __forceinline__ char* rows(int buffer, int tensor) const {
    return reinterpret_cast<char*>(&shared.rows[buffer][tensor][0][static_cast<int>(threadIdx.x) - lane()]);
  }
  __device__ __forceinline__ uint32_t* last(int buffer, int tensor) const {
    return Ring::kHasLast ? shared.last[buffer * T::kTensors + tensor][threadIdx.x / T::kLanes] : nullptr;
  }
};

// A thread's rows of a tile in shared memory.
template <typename T>
struct SharedRows {
  Shared<T>& shared;
  int buffer;
  __device__ __forceinline__ typename Shared<T>::Row& operator()(int tensor, int s) const {
    return shared.rows[buffer][tensor][s][threadIdx.x];
  }
};

// A thread's rows of a tile in registers.
template <typename T>
struct HeldRows {
  typename Shared<T>::Row rows[T::kTensors][T::kThreadSteps];

  __device__ __forceinline__ void take(const SharedRows<T>& source) {
#pragma unroll
    for (int s = 0; s < T::kThreadSteps; ++s) take(source, s);
  }
  __device__ __forceinline__ void take(const SharedRows<T>& source, int s) {
#pragma unroll
    for (int i = 0; i < T::kTensors; ++i) rows[i][s] = source(i, s);
  }
  __device__ __forceinline__ const typename Shared<T>::Row& operator()(int tensor, int s) const { return rows[tensor][s]; }
};

// The inputs of one step; get() converts them to the accumulation type.
template <typename T, typename Variant>
struct StepInputs {
  using Acc = typename T::Acc;
  static constexpr int kInputs = static_cast<int>(Variant::kNames.size());
  static constexpr int kNarrow = static_cast<int>(Variant::kFirstBroadcast);
  static constexpr int kWide = kInputs - kNarrow;
  static constexpr int kStaged = kStagedInputs<Variant, T::kIsForward>;

  typename T::Row staged[kStaged];
  cuda::Vector<Acc, T::kVector> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ void get(int j, Acc (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) x[i] = i < kStaged ? staged[i < kStaged ? i : 0].accumulate(j) : Acc(0);
#pragma unroll
    for (int i = 0; i < kWide; ++i) x[kNarrow + i] = wide[i][j];
  }
};

// Copies the rows of one of a thread's steps, of the first `staged` inputs, to shared memory. Absent inputs are zero.
template <typename Variant, typename T, int count>
__device__ __forceinline__ void stage_inputs(Rows<T> (&rows)[count], int staged, bool exists, const SharedRows<T>& target,
                                             int s) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if constexpr (kIsAny<Variant>) {
      if (i >= staged) continue;
      if (rows[i].view->data == nullptr) {
        target(i, s) = Shared<T>::Row::zero();
        continue;
      }
    }
    rows[i].stage_next(exists, &target(i, s));
  }
}

// The inputs of all of a thread's steps in a tile. Narrow inputs, which do not broadcast, are staged; wide ones come from
// global memory, or, in kernels for several recurrences, the first `staged` inputs from where narrow ones are. Inputs of
// missing steps are zero.
template <typename T, typename Variant>
struct ThreadInputs {
  using Step = StepInputs<T, Variant>;
  static constexpr int kWide = Step::kWide;

  int steps, staged;
  Rows<T> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ ThreadInputs(const LinearScanParams& p, const Partition& partition, const ThreadTile<T>& at)
      : steps(at.steps), staged(staged_inputs_of<Variant, T::kIsForward>(p)) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const SequenceView& view = p.inputs[Step::kNarrow + i];
      wide[i] = Rows<T>(view, partition, Partition::kInputs + Step::kNarrow + i, at, 0,
                        view.is_accumulate ? sizeof(typename T::Acc) : sizeof(typename T::Scalar));
    }
  }

  // Called for each step s, in order.
  template <typename StagedRows>
  __device__ __forceinline__ Step next(int s, const StagedRows& rows) {
    Step result;
#pragma unroll
    for (int i = 0; i < Step::kStaged && i < Step::kNarrow; ++i) result.staged[i] = rows(i, s);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      if constexpr (kIsAny<Variant>) {
        if (i + Step::kNarrow < staged) {
          const auto row = rows(i + Step::kNarrow, s);
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) result.wide[i].set(j, row.accumulate(j));
          continue;
        }
      }
      const bool exists = s < steps && (!kIsAny<Variant> || wide[i].view->data != nullptr);
      if (wide[i].view->is_accumulate) {
        result.wide[i] = wide[i].template load_next<typename T::Acc>(exists);
      } else {
        const auto values = wide[i].template load_next<typename T::Scalar>(exists);
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) result.wide[i].set(j, values.accumulate(j));
      }
    }
    return result;
  }
};

// Loads the thread's channels of a state; missing elements are zero.
template <typename T>
__device__ __forceinline__ void load_state(const StateView& view, int64_t sequence, const ThreadTile<T>& at,
                                           typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  const Acc* const source =
      static_cast<const Acc*>(view.data) + sequence * view.stride_sequence + at.channel * view.stride_channel;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    state[j] = view.data != nullptr && j < at.channels ? source[j * view.stride_channel] : Acc(0);
  }
}

template <typename T>
__device__ __forceinline__ void store_state(const StateView& view, int64_t sequence, const ThreadTile<T>& at,
                                            const typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  if (view.data == nullptr) return;
  Acc* const target = static_cast<Acc*>(view.data) + sequence * view.stride_sequence + at.channel * view.stride_channel;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    if (j < at.channels) target[j * view.stride_channel] = state[j];
  }
}

// Calls body(s, keeps) for a thread's steps. In plain tiles the loop includes steps that do not exist, and `unrolled` steps at
// a time are unrolled: their instructions overlap. In other tiles it has the first `count` steps. If keeps_gates and none is
// missing, it is unrolled, and body may keep values of each step in registers for the next loop (keeps is true).
template <typename T, bool keeps_gates, int unrolled = T::kThreadSteps, typename Body>
__device__ __forceinline__ void for_each_step(int count, const Body& body) {
  if constexpr (T::kPlain) {
#pragma unroll unrolled
    for (int s = 0; s < T::kThreadSteps; ++s) body(s, std::false_type());
  } else if (keeps_gates && count == T::kThreadSteps) {
#pragma unroll
    for (int s = 0; s < T::kThreadSteps; ++s) body(s, std::bool_constant<keeps_gates>());
  } else {
#pragma unroll 1
    for (int s = 0; s < count; ++s) body(s, std::false_type());
  }
}

// A step's gates: kept from the first loop over the steps, or computed again.
template <bool keeps, typename Gates, typename Variant, typename Acc>
__device__ __forceinline__ auto gates_again(std::bool_constant<keeps>, const Gates& kept, const Variant& variant,
                                            const Acc* x) {
  if constexpr (keeps) {
    return kept;
  } else {
    return variant.gates(x);
  }
}

// The steps of a kernel's work on shifted rows (for_each_plain_tile).
template <typename Shift, typename Apply, typename Store>
struct ShiftedWork {
  const Shift& shift;
  const Apply& apply;
  const Store& store;
};
template <typename Shift, typename Apply, typename Store>
ShiftedWork(const Shift&, const Apply&, const Store&) -> ShiftedWork<Shift, Apply, Store>;

// Loops over a block's tiles, which start from `initial`. stage(tile, buffer) starts the copies of a tile.
// reduce(tile, rows, own) computes the map of each thread's steps from `own` = identity, and returns whether a sequence begins
// in them. apply(tile, rows, state) computes the results from the state before the thread's steps.
//
// Plain tiles pass through a pipeline of three: while a block applies tile i from registers, the map of tile i + 1 is published
// and its rows are in one buffer, and the copies of tile i + 2 to the other one are in flight. The state before a tile thus has
// the time of a whole tile to arrive.
//
// Shifted rows: shift(tile, buffer) moves the elements of copied rows to where aligned rows have them. In place of apply,
// apply_shifted(tile, held, next_rows, state) computes the results, takes the next tile's rows to registers, and leaves each
// step's results in their place; store(tile, buffer) stores them, a row of a warp at a time.
template <typename T, typename Stage, typename Shifted, typename Reduce, typename Apply>
__device__ __forceinline__ void for_each_plain_tile(const LinearScanParams& p, const Partition& partition, Shared<T>& shared,
                                                    const StateView& initial, const Stage& stage, const Shifted& shifted,
                                                    const Reduce& reduce, const Apply& apply) {
  using Acc = typename T::Acc;
  TileQueue<T> queue(partition, shared.carry);
  uint32_t current = partition.tiles_in_all, next = current, later = current;  // no tile is current yet
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    next = later;
    later = queue.take_now(i);
    stage(ThreadTile<T>(p, partition, later), i);
    cuda::cp_async_commit();
  }
  FoldedTile<T> folded;
  HeldRows<T> held;
  int buffer = 0;
#pragma unroll 1
  do {
    queue.take();
    cuda::cp_async_wait<1>();
    if constexpr (T::kShifted) {
      __syncwarp();  // a lane reads what others copied
      shifted.shift(ThreadTile<T>(p, partition, next), buffer);
    }
    const SharedRows<T> next_rows{shared, buffer};
    FoldedTile<T> next_folded;
    Prefix<T> prefix;
    {
      const ThreadTile<T> at(p, partition, next);
      Map<Acc> own[T::kVector];
      if (next < partition.tiles_in_all) reduce(at, next_rows, own);
      queue.pass(buffer);
      prefix.read(shared.carry);  // of the current tile, before this thread overwrites it
      next_folded = fold<T>(shared.carry, own, false);
      publish_map<T>(partition, next, at.tile, next_folded);
    }
    if (current < partition.tiles_in_all) {
      const ThreadTile<T> at(p, partition, current);
      LookBack<T> look_back(partition, current, at.tile);
      look_back.finish(shared.carry, folded, [&](int channel) { return at.element(initial, p, channel); });
    }
    __syncthreads();
    if (current < partition.tiles_in_all) {
      Acc state[T::kVector];
      prefix.apply(shared.carry, false, state);
      if constexpr (T::kShifted) {
        shifted.apply(ThreadTile<T>(p, partition, current), held, next_rows, state);
        __syncwarp();  // a lane stores what others computed
        shifted.store(ThreadTile<T>(p, partition, current), buffer);
      } else {
        apply(ThreadTile<T>(p, partition, current), held, state);
      }
    } else if constexpr (T::kShifted) {
      held.take(next_rows);
    }
    if constexpr (!T::kShifted) held.take(next_rows);
    folded = next_folded;
    current = next;
    next = later;
    later = queue.taken(buffer);
    if constexpr (T::kShifted) __syncwarp();  // lanes copy to rows that others have read
    stage(ThreadTile<T>(p, partition, later), buffer);
    cuda::cp_async_commit();
    buffer ^= 1;
  } while (current < partition.tiles_in_all);
}

// Other tiles are computed one after another. The copies of the next tile are in flight meanwhile.
template <typename T, typename Stage, typename Reduce, typename Apply>
__device__ __forceinline__ void for_each_other_tile(const LinearScanParams& p, const Partition& partition, Shared<T>& shared,
                                                    const StateView& initial, const Stage& stage, const Reduce& reduce,
                                                    const Apply& apply) {
  using Acc = typename T::Acc;
  TileQueue<T> queue(partition, shared.carry);
  uint32_t current = queue.take_now(0);
  stage(ThreadTile<T>(p, partition, current), 1);
  cuda::cp_async_commit();
  uint32_t next = queue.take_now(1);
#pragma unroll 1
  for (int buffer = 1; current < partition.tiles_in_all; buffer ^= 1) {
    stage(ThreadTile<T>(p, partition, next), buffer ^ 1);
    cuda::cp_async_commit();
    cuda::cp_async_wait<1>();
    queue.take();
    const ThreadTile<T> at(p, partition, current);
    const SharedRows<T> rows{shared, buffer};
    LookBack<T> look_back(partition, current, at.tile);
    Map<Acc> own[T::kVector];
    const bool is_reset = reduce(at, rows, own);
    queue.pass(buffer ^ 1);
    const FoldedTile<T> folded = fold<T>(shared.carry, own, is_reset);
    publish_map<T>(partition, current, at.tile, folded);
    look_back.finish(shared.carry, folded, [&](int channel) { return at.element(initial, p, channel); });
    __syncthreads();
    Prefix<T> prefix;
    prefix.read(shared.carry);
    Acc state[T::kVector];
    prefix.apply(shared.carry, folded.prefix_is_reset, state);
    apply(at, rows, state);
    current = next;
    next = queue.taken(buffer ^ 1);
  }
}

template <typename T, typename Stage, typename Shifted, typename Reduce, typename Apply>
__device__ __forceinline__ void for_each_tile(const LinearScanParams& p, const Partition& partition, Shared<T>& shared,
                                              const StateView& initial, const Stage& stage, const Shifted& shifted,
                                              const Reduce& reduce, const Apply& apply) {
  if (partition.ticket_counter != nullptr) cuda::grid_dependency_sync();  // until the words are zero
  if constexpr (T::kPlain) {
    for_each_plain_tile<T>(p, partition, shared, initial, stage, shifted, reduce, apply);
  } else {
    for_each_other_tile<T>(p, partition, shared, initial, stage, reduce, apply);
  }
}

template <typename T, typename Kernel, typename Params>
cudaError_t launch_tiles(Kernel kernel, const Params& params, const Partition& partition, int resident_blocks,
                         cudaStream_t stream) {
  static_assert(sizeof(Shared<T>) <= 99 * 1024, "compute capability 8.6, 8.9 and 12.0 have 99 KB per block");
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, sizeof(Shared<T>)); error != cudaSuccess) return error;
  const auto at_a_time = static_cast<uint32_t>(partition.multiprocessors * resident_blocks);
  const bool has_words = partition.ticket_counter != nullptr;
  if (has_words) {
    if (const cudaError_t error = launch_clear_words(partition, stream); error != cudaSuccess) return error;
  }
  return cuda::launch(kernel, min(partition.tiles_in_all, at_a_time), kThreads, static_cast<int>(sizeof(Shared<T>)), stream,
                      /*uses_pdl=*/has_words && cuda::has_pdl(kernel), params, partition);
}

template <TileRows rows>
using ConstantRows = std::integral_constant<TileRows, rows>;

// Calls launch(variant, rows) for the tile kernel that takes a call and returns its error. `rows` is a constant TileRows.
template <typename Scalar, bool is_forward, typename Launch>
cudaError_t launch_variant(const LinearScanParams& params, const Partition& partition, const Launch& launch) {
  check_known(params.options.candidate_activation);
  cudaError_t error = cudaSuccess;
  const auto launch_own = [&](auto variant, auto rows) {
    using Variant = decltype(variant);
    if constexpr (has_tile_kernel(recurrence_of<Variant>(), scalar_kind_of<Scalar>(), decltype(rows)::value, is_forward)) {
      error = launch(variant, rows);
    } else {
      error = launch(GeneralVariant<Scalar, Variant>(), ConstantRows<TileRows::kAny>());
    }
  };
  if (partition.is_plain && params.options.are_default()) {
    visit_default_recurrence(params.recurrence, [&](auto variant) {
      if (partition.is_shifted) {
        launch_own(variant, ConstantRows<TileRows::kShifted>());
      } else {
        launch_own(variant, ConstantRows<TileRows::kVectors>());
      }
    });
  } else {
    visit_recurrence_at_run_time(params.recurrence, [&](auto variant) { launch_own(variant, ConstantRows<TileRows::kAny>()); });
  }
  return error;
}

}  // namespace ssm_kernels::linear_scan
