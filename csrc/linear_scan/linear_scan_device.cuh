// What the forward and the backward kernel of the linear scan share: where a thread is, its rows of the tensors, and the shared
// memory through which they pass.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/launch.cuh"
#include "linear_scan/linear_scan_carry.cuh"

namespace ssm_kernels::linear_scan {

// A thread in a tile.
template <typename T>
struct Place {
  uint32_t chain, tile;
  int64_t batch;
  int64_t position;  // of its first step
  int64_t channel;   // its first
  int channels;      // that exist, up to kVector
  int steps;         // that exist, up to T::kThreadSteps

  __device__ __forceinline__ Place(const LinearScanParams& p, const Partition& partition, uint32_t index) {
    tile = partition.chains.divide(index);
    chain = index - tile * partition.chains.value<uint32_t>();
    const uint32_t entry = partition.channel_blocks.divide(chain);
    batch = entry;
    const int segment = threadIdx.x / T::kLanes, lane = threadIdx.x % T::kLanes;
    position = int64_t(tile) * T::kSteps + segment * T::kThreadSteps;
    channel = int64_t(chain - entry * partition.channel_blocks.value<uint32_t>()) * kTileChannels + lane * T::kVector;
    channels = static_cast<int>(max(int64_t(0), min(int64_t(T::kVector), p.channels - channel)));
    steps = static_cast<int>(max(int64_t(0), min(int64_t(T::kThreadSteps), p.seqlen - position)));
  }

  // The thread's channel of the tile, one of kTileChannels, where a thread stands for one; as a state's element, zero without
  // it.
  __device__ __forceinline__ typename T::Acc element(const StateView& view, const LinearScanParams& p, int tile_channel) const {
    const int64_t c = channel - threadIdx.x % T::kLanes * T::kVector + tile_channel;
    if (view.data == nullptr || c >= p.channels) return 0;
    return static_cast<const typename T::Acc*>(view.data)[batch * view.stride_sequence + c * view.stride_channel];
  }
};

// A tensor as the thread sees it.
template <typename T>
struct Rows {
  using Scalar = typename T::Scalar;
  using Acc = typename T::Acc;
  static constexpr int kVector = T::kVector;

  const SequenceView& view;
  int64_t offset;
  int channels;
  bool vectors;

  __device__ __forceinline__ Rows(const SequenceView& view, const Partition& partition, int bit, const Place<T>& at)
      : view(view),
        offset(at.batch * view.stride_batch + at.channel * view.stride_channel),
        channels(at.channels),
        vectors((T::kPlain || (partition.vector_views >> bit & 1) != 0) && at.channels > 0) {}

  template <typename Element>
  __device__ __forceinline__ Element* row(int64_t step) const {
    return static_cast<Element*>(view.data) + offset + step * view.stride_step;
  }

  // Zero where there is no element.
  template <typename Element>
  __device__ __forceinline__ cuda::Vector<Element, kVector> load(int64_t step) const {
    using Vector = cuda::Vector<Element, kVector>;
    Vector result = Vector::zero();
    if (vectors) {
      result = Vector::load(row<Element>(step));
    } else if constexpr (!T::kPlain) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < channels) result.set(j, row<Element>(step)[j * view.stride_channel]);
      }
    }
    return result;
  }

  // Into shared memory, where it is once the thread has waited for its asynchronous copies.
  __device__ __forceinline__ void stage(int64_t step, cuda::Vector<Scalar, kVector>* place) const {
    if (vectors) {
      cuda::async_copy(place, row<Scalar>(step), cuda::kAsyncCopyBytes);
    } else if constexpr (!T::kPlain) {
      *place = load<Scalar>(step);
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store(int64_t step, const cuda::Vector<Element, kVector>& values) const {
    if (vectors) {
      values.store_once(row<Element>(step));
    } else if constexpr (!T::kPlain) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < channels) row<Element>(step)[j * view.stride_channel] = values[j];
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

// The inputs of one of a thread's steps: the narrow ones, which do not broadcast, from shared memory, the others from where
// they are, in the accumulation type.
template <typename T, typename Variant>
struct StepInputs {
  using Acc = typename T::Acc;
  static constexpr int kInputs = static_cast<int>(Variant::kNames.size());
  static constexpr int kNarrow = static_cast<int>(Variant::kFirstBroadcast);
  static constexpr int kWide = kInputs - kNarrow;

  typename Shared<T>::Row narrow[kNarrow];
  cuda::Vector<Acc, T::kVector> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ StepInputs(Shared<T>& shared, int buffer, int s, int64_t step, const LinearScanParams& p,
                                        const Partition& partition, const Place<T>& at) {
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) narrow[i] = shared.row(buffer, i, s);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const Rows<T> rows(p.inputs[kNarrow + i], partition, Partition::kInputs + kNarrow + i, at);
      if (rows.view.is_accumulate) {
        wide[i] = rows.template load<Acc>(step);
      } else {
        const auto values = rows.template load<typename T::Scalar>(step);
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) wide[i].set(j, cuda::to_accumulate(values[j]));
      }
    }
  }

  __device__ __forceinline__ void get(int j, Acc (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) x[i] = cuda::to_accumulate(narrow[i][j]);
#pragma unroll
    for (int i = 0; i < kWide; ++i) x[kNarrow + i] = wide[i][j];
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

// body(s) for the first `count` of `steps`.
template <bool is_unrolled, int steps, typename Body>
__device__ __forceinline__ void for_each_step(int count, const Body& body) {
  if constexpr (is_unrolled) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      if (s < count) body(s);
    }
  } else {
#pragma unroll 1
    for (int s = 0; s < count; ++s) body(s);
  }
}

// Works through a block's tiles: stage(place, buffer) starts the copies of a tile, work(place, buffer) does the rest, with
// carry() in it. While a block works at one tile, the next is on its way.
template <typename T, typename Stage, typename Work>
__device__ __forceinline__ void for_each_tile(const LinearScanParams& p, const Partition& partition, Shared<T>& shared,
                                              const Stage& stage, const Work& work) {
  TileQueue<T> queue(partition, shared.carry);
  if (queue.current < partition.tiles_in_all) stage(Place<T>(p, partition, queue.current), 0);
  cuda::commit_async_copies();
  queue.take_second();
  for (int buffer = 0; queue.current < partition.tiles_in_all; buffer ^= 1) {
    if (queue.next < partition.tiles_in_all) stage(Place<T>(p, partition, queue.next), buffer ^ 1);
    cuda::commit_async_copies();
    cuda::wait_for_async_copies<1>();
    queue.begin();
    work(Place<T>(p, partition, queue.current), buffer);
    queue.end();
  }
}

template <typename T, typename Kernel, typename Params>
int launch_tiles(Kernel kernel, const Params& params, const Partition& partition, int resident_blocks, cudaStream_t stream) {
  static_assert(sizeof(Shared<T>) <= 99 * 1024, "what a block of compute capability 8.6, 8.9 or 12.0 may have");
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, sizeof(Shared<T>)); error != cudaSuccess) return error;
  const auto at_a_time = static_cast<uint32_t>(partition.multiprocessors * resident_blocks);
  kernel<<<min(partition.tiles_in_all, at_a_time), kThreads, sizeof(Shared<T>), stream>>>(params, partition);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::linear_scan
