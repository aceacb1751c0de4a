// Device code of the linear scan's forward and backward: a thread's part of a tile, its rows of the tensors, the pipeline
// through shared memory, and launches.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/pdl.cuh"
#include "linear_scan/cuda/carry.cuh"

namespace ssm_kernels::linear_scan {

// A thread's part of a tile.
template <typename T>
struct ThreadTile {
  uint32_t index;  // the tile's number
  uint32_t tile;   // its number in the chain
  int64_t batch;
  int64_t first;    // step
  int64_t channel;  // its first
  int channels;     // that exist, up to kVector
  int steps;        // that exist, up to T::kThreadSteps; in plain tiles none without channels

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
    channels = T::kPlain ? T::kVector : count(p.channels - channel, T::kVector);
    const bool exists = index < partition.tiles_in_all && (!T::kPlain || channel < p.channels);
    steps = exists ? count(p.seqlen - position, T::kThreadSteps) : 0;
  }

  __device__ __forceinline__ int64_t step(int s) const { return T::kIsForward ? first + s : first - s; }

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

// The thread's rows of a tensor: row s is step s, or the step `earlier` steps before it.
template <typename T>
struct Rows {
  using Scalar = typename T::Scalar;
  using Acc = typename T::Acc;
  static constexpr int kVector = T::kVector;

  const SequenceView* view;
  int64_t offset, stride;  // of row 0, and from row to row
  int channels;
  bool vectors;

  Rows() = default;
  __device__ __forceinline__ Rows(const SequenceView& view, const Partition& partition, int bit, const ThreadTile<T>& at,
                                  int earlier = 0)
      : view(&view),
        offset(at.batch * view.stride_batch + (at.first - earlier) * view.stride_step +
               (T::kPlain ? at.channel : at.channel * view.stride_channel)),
        stride(T::kIsForward ? view.stride_step : -view.stride_step),
        channels(at.channels),
        vectors(T::kPlain || ((partition.vector_views >> bit & 1) != 0 && at.channels > 0)) {}

  template <typename Element>
  __device__ __forceinline__ Element* row(int s) const {
    return static_cast<Element*>(view->data) + offset + s * stride;
  }

  // Missing elements are zero.
  template <typename Element>
  __device__ __forceinline__ cuda::Vector<Element, kVector> load(int s) const {
    using Vector = cuda::Vector<Element, kVector>;
    Vector result = Vector::zero();
    if (vectors) {
      result = Vector::load(row<Element>(s));
    } else if constexpr (!T::kPlain) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < channels) result.set(j, row<Element>(s)[j * view->stride_channel]);
      }
    }
    return result;
  }

  // Copies a row to shared memory, asynchronously if it is a vector.
  __device__ __forceinline__ void stage(int s, cuda::Vector<Scalar, kVector>* target) const {
    if (vectors) {
      cuda::cp_async(target, row<Scalar>(s), cuda::kCpAsyncBytes);
    } else if constexpr (!T::kPlain) {
      *target = load<Scalar>(s);
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store(int s, const cuda::Vector<Element, kVector>& values) const {
    if (vectors) {
      values.store_once(row<Element>(s));
    } else if constexpr (!T::kPlain) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < channels) row<Element>(s)[j * view->stride_channel] = values[j];
      }
    }
  }
};

// A block's shared memory: two buffers, for the current tile and the next one, and the carry's arrays. A thread reads only the
// rows that it copied.
template <typename T>
struct Shared {
  using Row = cuda::Vector<typename T::Scalar, T::kVector>;
  Row rows[2][T::kTensors][T::kThreadSteps][kThreads];
  CarryShared<T> carry;

  __device__ __forceinline__ Row& row(int buffer, int tensor, int s) { return rows[buffer][tensor][s][threadIdx.x]; }
};

// The inputs of one step; get() converts them to the accumulation type.
template <typename T, typename Variant>
struct StepInputs {
  using Acc = typename T::Acc;
  static constexpr int kInputs = static_cast<int>(Variant::kNames.size());
  static constexpr int kNarrow = static_cast<int>(Variant::kFirstBroadcast);
  static constexpr int kWide = kInputs - kNarrow;

  typename Shared<T>::Row narrow[kNarrow];
  cuda::Vector<Acc, T::kVector> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ void get(int j, Acc (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) x[i] = narrow[i].accumulate(j);
#pragma unroll
    for (int i = 0; i < kWide; ++i) x[kNarrow + i] = wide[i][j];
  }
};

// The inputs of all of a thread's steps in a tile. Narrow inputs, which do not broadcast, come from shared memory, wide ones
// from global memory.
template <typename T, typename Variant>
struct ThreadInputs {
  using Step = StepInputs<T, Variant>;
  static constexpr int kNarrow = Step::kNarrow, kWide = Step::kWide;

  Shared<T>& shared;
  int buffer;
  Rows<T> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ ThreadInputs(Shared<T>& shared, int buffer, const LinearScanParams& p, const Partition& partition,
                                          const ThreadTile<T>& at)
      : shared(shared), buffer(buffer) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) wide[i] = Rows<T>(p.inputs[kNarrow + i], partition, Partition::kInputs + kNarrow + i, at);
  }

  __device__ __forceinline__ Step operator[](int s) const {
    Step result;
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) result.narrow[i] = shared.row(buffer, i, s);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      if (wide[i].view->is_accumulate) {
        result.wide[i] = wide[i].template load<typename T::Acc>(s);
      } else {
        const auto values = wide[i].template load<typename T::Scalar>(s);
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

// Calls body(s, keeps) for the first `count` of a thread's steps. If is_unrolled and no step is missing, the loop is unrolled:
// the instructions of several steps overlap, and body may keep values of each step in registers for the next loop (keeps is
// true).
template <typename T, bool is_unrolled, typename Body>
__device__ __forceinline__ void for_each_step(int count, const Body& body) {
  if (is_unrolled && count == T::kThreadSteps) {
#pragma unroll
    for (int s = 0; s < T::kThreadSteps; ++s) body(s, std::bool_constant<is_unrolled>());
  } else {
#pragma unroll 1
    for (int s = 0; s < count; ++s) body(s, std::false_type());
  }
}

// A step's gates: kept from the first loop over the steps, or computed again.
template <bool keeps, typename Gates, typename Variant, typename Acc>
__device__ __forceinline__ Gates gates_again(std::bool_constant<keeps>, const Gates& kept, const Variant& variant,
                                             const Acc* x) {
  if constexpr (keeps) {
    return kept;
  } else {
    return variant.gates(x);
  }
}

// Loops over a block's tiles: stage(tile, buffer) starts the copies of a tile, and work(tile, buffer), which calls carry(),
// computes it. The copies of the next tile are in flight meanwhile.
template <typename T, typename Stage, typename Work>
__device__ __forceinline__ void for_each_tile(const LinearScanParams& p, const Partition& partition, Shared<T>& shared,
                                              const Stage& stage, const Work& work) {
  if (partition.ticket_counter != nullptr) cuda::grid_dependency_sync();  // until the words are zero
  TileQueue<T> queue(partition, shared.carry);
  stage(ThreadTile<T>(p, partition, queue.current), 1);
  cuda::cp_async_commit();
  queue.take_second();
  for (int buffer = 1; queue.current < partition.tiles_in_all; buffer ^= 1) {
    stage(ThreadTile<T>(p, partition, queue.next), buffer ^ 1);
    cuda::cp_async_commit();
    cuda::cp_async_wait<1>();
    queue.begin(buffer);
    work(ThreadTile<T>(p, partition, queue.current), buffer);
    queue.end(buffer);
  }
}

// Plain tiles have a kernel per recurrence and options. Other tiles, and doubles, have one kernel per recurrence, which reads
// its options at run time, to keep the build short.
template <typename Scalar>
constexpr bool kHasPlainKernels = !std::is_same_v<Scalar, double>;

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

// Calls launch(variant, is_plain) for a call's recurrence and returns its error.
template <typename Scalar, typename Launch>
cudaError_t launch_variant(const LinearScanParams& params, const Partition& partition, const Launch& launch) {
  cudaError_t error = cudaSuccess;
  if constexpr (kHasPlainKernels<Scalar>) {
    if (partition.is_plain) {
      visit_recurrence(params.recurrence, params.options, [&](auto variant) { error = launch(variant, std::true_type()); });
      return error;
    }
  }
  visit_recurrence_at_run_time(params.recurrence, [&](auto variant) { error = launch(variant, std::false_type()); });
  return error;
}

}  // namespace ssm_kernels::linear_scan
