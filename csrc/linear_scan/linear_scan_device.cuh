// What the forward and the backward kernel of the linear scan share: where a thread is, and its rows of the tensors.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/launch.cuh"
#include "linear_scan/linear_scan_carry.cuh"

namespace ssm_kernels::linear_scan {

// A thread has kSteps consecutive positions of kVector neighboring channels.
template <typename T>
struct Place {
  int64_t chain, tile, batch;
  int64_t position;  // of the first step
  int64_t channel;   // the first
  int channels;      // that exist, up to kVector

  __device__ __forceinline__ Place(const LinearScanParams& p, const Partition& partition) {
    tile = blockIdx.x / partition.chains;
    chain = blockIdx.x - tile * partition.chains;
    batch = chain / partition.channel_blocks;
    const int64_t channel_block = chain - batch * partition.channel_blocks;
    const int segment = threadIdx.x / T::kLanes, lane = threadIdx.x % T::kLanes;
    position = tile * T::kTileSteps + segment * T::kSteps;
    channel = channel_block * kTileChannels + lane * T::kVector;
    channels = static_cast<int>(max(int64_t(0), min(int64_t(T::kVector), p.channels - channel)));
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
        vectors((partition.vector_views >> bit & 1) != 0 && at.channels > 0) {}

  template <typename Element>
  __device__ __forceinline__ Element* row(int64_t step) const {
    return static_cast<Element*>(view.data) + offset + step * view.stride_step;
  }

  // Zero where there is no element.
  template <typename Element>
  __device__ __forceinline__ cuda::Vector<Element, kVector> load(int64_t step) const {
    using Vector = cuda::Vector<Element, kVector>;
    if (vectors) return Vector::load(row<Element>(step));
    Vector result = Vector::zero();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j < channels) result.set(j, row<Element>(step)[j * view.stride_channel]);
    }
    return result;
  }

  // Into shared memory, where it is once the thread has waited for its asynchronous copies.
  __device__ __forceinline__ void stage(int64_t step, cuda::Vector<Scalar, kVector>* place) const {
    if (vectors) {
      cuda::async_copy(place, row<Scalar>(step), cuda::kAsyncCopyBytes);
    } else {
      *place = load<Scalar>(step);
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store(int64_t step, const cuda::Vector<Element, kVector>& values) const {
    if (vectors) return values.store_once(row<Element>(step));
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j < channels) row<Element>(step)[j * view.stride_channel] = values[j];
    }
  }
};

// Shared memory of a block: T::kTensors tensors of its tile, each thread's rows in its own places.
template <typename T>
struct Stage {
  using Row = cuda::Vector<typename T::Scalar, T::kVector>;
  static constexpr size_t kBytes = size_t(T::kTensors) * T::kSteps * kTileThreads * sizeof(Row);

  Row* memory;
  __device__ __forceinline__ Row* place(int tensor, int s) const {
    return memory + (tensor * T::kSteps + s) * kTileThreads + threadIdx.x;
  }
};

// The inputs of one of a thread's steps: the narrow ones from the stage, those that may broadcast from memory.
template <typename T, typename Variant>
struct StepInputs {
  using Acc = typename T::Acc;
  static constexpr int kInputs = static_cast<int>(Variant::kNames.size());
  static constexpr int kNarrow = static_cast<int>(Variant::kFirstBroadcast);
  static constexpr int kWide = kInputs - kNarrow;

  typename Stage<T>::Row narrow[kNarrow];
  cuda::Vector<Acc, T::kVector> wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ StepInputs(const Stage<T>& stage, int s, int64_t step, const LinearScanParams& p,
                                        const Partition& partition, const Place<T>& at) {
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) narrow[i] = *stage.place(i, s);
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
  for (int j = 0; j < T::kVector; ++j)
    state[j] = view.data != nullptr && j < at.channels ? source[j * view.stride_channel] : Acc(0);
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

// Blocks that a multiprocessor of 227 KiB holds at a time.
constexpr int resident_blocks(int tensors) { return tensors <= 2 || tensors == 4 ? 3 : 2; }

}  // namespace ssm_kernels::linear_scan
