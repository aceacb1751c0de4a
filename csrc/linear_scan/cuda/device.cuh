// What the forward and the backward kernel of the linear scan share: where a thread is, its rows of the tensors, and the shared
// memory through which they pass.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "linear_scan/cuda/carry.cuh"

namespace ssm_kernels::linear_scan {

// A thread in a tile.
template <typename T>
struct Place {
  uint32_t index;  // the tile among all
  uint32_t tile;   // and in its chain
  int64_t batch;
  int64_t first;    // step
  int64_t channel;  // its first
  int channels;     // that exist, up to kVector
  int steps;        // that exist, up to T::kThreadSteps; in plain tiles none without channels

  __device__ __forceinline__ Place(const LinearScanParams& p, const Partition& partition, uint32_t index)
      : index(index), tile(partition.chains.divide(index)) {
    const uint32_t chain = index - tile * partition.chains.value<uint32_t>();
    const uint32_t entry = partition.channel_blocks.divide(chain);
    const uint32_t block = chain - entry * partition.channel_blocks.value<uint32_t>();
    const uint32_t segment = threadIdx.x / T::kLanes, lane = threadIdx.x % T::kLanes;
    const int64_t position = int64_t(tile) * T::kSteps + segment * T::kThreadSteps;
    batch = entry;
    first = T::kIsForward ? position : p.seqlen - 1 - position;
    channel = int64_t(block) * kTileChannels + lane * T::kVector;
    channels = T::kPlain ? T::kVector : count(p.channels - channel, T::kVector);
    const bool is_there = index < partition.tiles_in_all && (!T::kPlain || channel < p.channels);
    steps = is_there ? count(p.seqlen - position, T::kThreadSteps) : 0;
  }

  __device__ __forceinline__ int64_t step(int s) const { return T::kIsForward ? first + s : first - s; }

  // `left`, from 0 up to `most`.
  static __device__ __forceinline__ int count(int64_t left, int most) {
    return left >= most ? most : max(static_cast<int>(left), 0);
  }

  // The thread's channel of the tile, one of kTileChannels, where a thread stands for one; as a state's element, zero without
  // it.
  __device__ __forceinline__ typename T::Acc element(const StateView& view, const LinearScanParams& p, int tile_channel) const {
    const int64_t c = channel - threadIdx.x % T::kLanes * T::kVector + tile_channel;
    if (view.data == nullptr || c >= p.channels) return 0;
    return static_cast<const typename T::Acc*>(view.data)[batch * view.stride_sequence + c * view.stride_channel];
  }
};

// The thread's rows of a tensor: its step s is row s. They may lie `earlier` by some steps.
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
  __device__ __forceinline__ Rows(const SequenceView& view, const Partition& partition, int bit, const Place<T>& at,
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

  // Zero where there is no element.
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

  // Into shared memory, where it is once the thread has waited for its asynchronous copies.
  __device__ __forceinline__ void stage(int s, cuda::Vector<Scalar, kVector>* place) const {
    if (vectors) {
      cuda::cp_async(place, row<Scalar>(s), cuda::kCpAsyncBytes);
    } else if constexpr (!T::kPlain) {
      *place = load<Scalar>(s);
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

// A block's shared memory: two buffers, of the tile at work and of the next one, in which each thread has its own places; and
// what the carry needs.
template <typename T>
struct Shared {
  using Row = cuda::Vector<typename T::Scalar, T::kVector>;
  Row rows[2][T::kTensors][T::kThreadSteps][kThreads];
  CarryShared<T> carry;

  __device__ __forceinline__ Row& row(int buffer, int tensor, int s) { return rows[buffer][tensor][s][threadIdx.x]; }
};

// The inputs of one of a thread's steps, in the accumulation type as they are taken out.
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

// Those of all of its steps in a tile: the narrow ones, which do not broadcast, come from shared memory, the others from where
// they are.
template <typename T, typename Variant>
struct ThreadInputs {
  using Step = StepInputs<T, Variant>;
  static constexpr int kNarrow = Step::kNarrow, kWide = Step::kWide;

  Shared<T>& shared;
  int buffer;
  Rows<T> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ ThreadInputs(Shared<T>& shared, int buffer, const LinearScanParams& p, const Partition& partition,
                                          const Place<T>& at)
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

// The thread's channels of a state; zero where there is none.
template <typename T>
__device__ __forceinline__ void load_state(const StateView& view, int64_t sequence, const Place<T>& at,
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
__device__ __forceinline__ void store_state(const StateView& view, int64_t sequence, const Place<T>& at,
                                            const typename T::Acc (&state)[T::kVector]) {
  using Acc = typename T::Acc;
  if (view.data == nullptr) return;
  Acc* const target = static_cast<Acc*>(view.data) + sequence * view.stride_sequence + at.channel * view.stride_channel;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    if (j < at.channels) target[j * view.stride_channel] = state[j];
  }
}

// body(s, keeps) for the first `count` of a thread's steps. Where none of them is missing, and if that is wanted, the loop is
// unrolled: its instructions of several steps overlap, and body may keep something of each step in registers for the next loop.
// Else the loop is short and body keeps nothing.
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

// Works through a block's tiles: stage(place, buffer) starts the copies of a tile, work(place, buffer) does the rest, with
// carry() in it. While a block works at one tile, the next is on its way.
template <typename T, typename Stage, typename Work>
__device__ __forceinline__ void for_each_tile(const LinearScanParams& p, const Partition& partition, Shared<T>& shared,
                                              const Stage& stage, const Work& work) {
  TileQueue<T> queue(partition, shared.carry);
  stage(Place<T>(p, partition, queue.current), 1);
  cuda::cp_async_commit();
  queue.take_second();
  for (int buffer = 1; queue.current < partition.tiles_in_all; buffer ^= 1) {
    stage(Place<T>(p, partition, queue.next), buffer ^ 1);
    cuda::cp_async_commit();
    cuda::cp_async_wait<1>();
    queue.begin(buffer);
    work(Place<T>(p, partition, queue.current), buffer);
    queue.end(buffer);
  }
}

// Plain tiles have kernels in which the compiler knows a recurrence's options. Tiles that are not plain, and doubles, have one
// kernel for each recurrence, which reads its options: the build is shorter.
template <typename Scalar>
constexpr bool kHasPlainKernels = !std::is_same_v<Scalar, double>;

template <typename T, typename Kernel, typename Params>
cudaError_t launch_tiles(Kernel kernel, const Params& params, const Partition& partition, int resident_blocks,
                         cudaStream_t stream) {
  static_assert(sizeof(Shared<T>) <= 99 * 1024, "what a block of compute capability 8.6, 8.9 or 12.0 may have");
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, sizeof(Shared<T>)); error != cudaSuccess) return error;
  const auto at_a_time = static_cast<uint32_t>(partition.multiprocessors * resident_blocks);
  kernel<<<min(partition.tiles_in_all, at_a_time), kThreads, sizeof(Shared<T>), stream>>>(params, partition);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::linear_scan
