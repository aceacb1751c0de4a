// The summary of a span of steps, on CUDA: the map h -> decay h + last_state of all of its steps, without writing the states.
//
//   last_state = h_seqlen of h_t = a_t h_{t-1} + b_t from h_0 = 0        decay = a_1 a_2 ... a_seqlen
//
// Inputs are (batch, seqlen, channels), results (sequences, channels): a sequence is a row of the batch or a packed sequence.
// No step needs the state before it, so that blocks wait for nobody:
//
// 1. linear_scan_summary_kernel. A block has one tile: kTileChannels channels over T::kSteps steps of one sequence. A thread
//    has kVector neighboring channels over kThreadSteps steps, and takes the map of its steps from raw inputs in registers. The
//    first threads fold the maps of the tile's segments, in order, and write the tile's map, or, where the sequence has no
//    other tile, the results.
// 2. summary_fold_kernel folds the maps of each longer sequence. A block has kTileChannels channels. Each of its threads folds
//    a share of the tiles, and the first of them fold the shares.
//
// Each input is read once; the maps are two numbers a channel for T::kSteps steps. Tiles begin where sequences begin, and the
// order in which they are folded depends on the sequence's length alone, so that its results have the same bits whatever else
// is in the batch. Packed sequence i has tiles from number floor(begin / kSteps) + i on. These are enough for any length, so
// that the host, which does not read the lengths, knows the number of all tiles.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "linear_scan/cuda/tile.cuh"

namespace ssm_kernels::linear_scan {

template <typename Scalar, bool is_plain>
using SummaryTile = Tile<Scalar, kSummaryThreadSteps, 1, is_plain ? TileRows::kVectors : TileRows::kAny, true>;
// Blocks of a multiprocessor, at least. Doubles take more registers.
template <typename Scalar>
constexpr int kSummaryBlocks = sizeof(Scalar) < 8 ? 4 : 3;
// Steps whose inputs a thread loads before it uses them.
template <bool is_plain>
constexpr int kSummaryStepsAtOnce = is_plain ? 4 : 1;

// Consecutive steps as a map, and whether a sequence begins among them: then their decay counts for nothing.
template <typename Acc>
struct SpanMap {
  Map<Acc> map;
  bool is_reset = false;

  __device__ __forceinline__ SpanMap after(const SpanMap& first) const {
    if (is_reset) return *this;
    SpanMap result{map.after(first.map, false), first.is_reset};
    // A decay of zero stays zero, even if that of later steps has overflowed.
    if (first.map.decay == Acc(0) && isinf(map.decay)) result.map.decay = 0;
    return result;
  }
  __device__ __forceinline__ Acc decay() const { return is_reset ? Acc(0) : map.decay; }
};

// Where a sequence is.
struct SequenceOfSpan {
  int64_t begin, steps;  // its first step, and its length
  int64_t tile;          // its first, among all

  __device__ __forceinline__ SequenceOfSpan(const SummaryPartition& partition, int64_t seqlen, int64_t sequence,
                                            int steps_of_tile) {
    if (partition.bounds == nullptr) {
      begin = 0;
      steps = seqlen;
      tile = sequence * partition.tiles;
    } else {
      begin = partition.bounds[sequence];
      steps = max(partition.bounds[sequence + 1] - begin, int64_t(0));
      tile = begin / steps_of_tile + sequence;
    }
  }
};

// The sequence of a tile: of packed ones the last whose first tile is not after it.
__device__ __forceinline__ int64_t sequence_of_tile(const SummaryPartition& partition, uint32_t tile, int steps_of_tile) {
  if (partition.bounds == nullptr) return partition.sequence_tiles.divide(tile);
  int64_t low = 0, high = partition.sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (partition.bounds[middle] / steps_of_tile + middle <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename Scalar, typename Variant, bool is_plain>
__global__ void __launch_bounds__(kThreads, kSummaryBlocks<Scalar>)
    linear_scan_summary_kernel(const __grid_constant__ LinearScanSummaryParams p,
                               const __grid_constant__ SummaryPartition partition) {
  using T = SummaryTile<Scalar, is_plain>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  constexpr int kAtOnce = kSummaryStepsAtOnce<is_plain>;
  __shared__ __align__(kVectorBytes) Acc decays[T::kSegments][kTileChannels], offsets[T::kSegments][kTileChannels];
  __shared__ bool resets[T::kSegments];
  const Variant variant = variant_of<Variant>(p);

  const uint32_t tile = partition.channel_blocks.divide(blockIdx.x);
  const int64_t block_channel = int64_t(blockIdx.x - tile * partition.channel_blocks.value<uint32_t>()) * kTileChannels;
  const int64_t sequence = sequence_of_tile(partition, tile, T::kSteps);
  const SequenceOfSpan of(partition, p.seqlen, sequence, T::kSteps);
  const int64_t tile_position = (tile - of.tile) * T::kSteps;  // in the sequence
  cuda::launch_dependents();
  if (tile_position < 0 || tile_position >= of.steps) return;

  const int segment = threadIdx.x / T::kLanes, first_channel = threadIdx.x % T::kLanes * T::kVector;
  const int64_t position = tile_position + segment * kSummaryThreadSteps, row = partition.bounds == nullptr ? sequence : 0;
  const ThreadTile<T> at(p, row, of.begin + position, of.steps - position, block_channel + first_channel);
  Rows<T> rows[Inputs::kStaged];
#pragma unroll
  for (int i = 0; i < Inputs::kStaged; ++i) rows[i] = Rows<T>(p.inputs[i], partition, Partition::kInputs + i, at);
  ThreadInputs<T, Variant> inputs(p, partition, at);
  Map<Acc> own[T::kVector];
  bool is_reset = false;
#pragma unroll 1
  for (int first = 0; first < at.steps; first += kAtOnce) {
    Inputs loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded[i] = inputs.next(first + i, [&](int input, int s) { return rows[input].load_row(s < at.steps); });
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= at.steps) break;
      if constexpr (!T::kPlain) {
        if (p.is_reset(at.batch, at.step(first + i))) {
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) own[j] = Map<Acc>();
          is_reset = true;
        }
      }
      with_recurrence(variant, [&](const auto& recurrence) {
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) {
          Acc x[Inputs::kInputs];
          loaded[i].get(j, x);
          const Step<Acc> step = recurrence.step(recurrence.gates(x), x);
          own[j] = {own[j].decay * step.a, Math<Acc>::fma(step.a, own[j].offset, step.b)};
        }
      });
    }
  }
  cuda::Vector<Acc, T::kVector> decay, offset;
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    decay.set(j, own[j].decay);
    offset.set(j, own[j].offset);
  }
  decay.store(&decays[segment][first_channel]);
  offset.store(&offsets[segment][first_channel]);
  if (!T::kPlain && first_channel == 0) resets[segment] = is_reset;
  __syncthreads();

  const int channel = static_cast<int>(threadIdx.x);
  if (channel >= kTileChannels || block_channel + channel >= p.channels) return;
  SpanMap<Acc> total;
#pragma unroll
  for (int s = 0; s < T::kSegments; ++s) {
    total = SpanMap<Acc>{{decays[s][channel], offsets[s][channel]}, !T::kPlain && resets[s]}.after(total);
  }
  if (of.steps <= T::kSteps) {
    const int64_t to = block_channel + channel;
    p.last_state.template element<Acc>(sequence, to) = total.map.offset;
    p.decay.template element<Acc>(sequence, to) = total.decay();
    return;
  }
  const int64_t to = int64_t(blockIdx.x) * kTileChannels + channel;
  static_cast<Map<Acc>*>(partition.maps)[to] = total.map;
  if (channel == 0 && partition.resets != nullptr) partition.resets[blockIdx.x] = total.is_reset;
}

// A block for each sequence and kTileChannels channels.
template <typename Acc>
__global__ void __launch_bounds__(kSummaryFoldThreads)
    summary_fold_kernel(const __grid_constant__ LinearScanSummaryParams p, const __grid_constant__ SummaryPartition partition,
                        int steps_of_tile) {
  constexpr int kAtOnce = 8;  // maps that a thread loads before it folds them
  __shared__ SpanMap<Acc> folded[kSummaryShares][kTileChannels];
  const auto blocks = partition.channel_blocks.value<uint32_t>();
  const uint32_t sequence = partition.channel_blocks.divide(blockIdx.x), block = blockIdx.x - sequence * blocks;
  const int share = static_cast<int>(threadIdx.x) / kTileChannels, channel = static_cast<int>(threadIdx.x) % kTileChannels;
  const SequenceOfSpan of(partition, p.seqlen, sequence, steps_of_tile);
  cuda::grid_dependency_sync();
  if (of.steps <= steps_of_tile) return;

  const int64_t tiles = min(ceil_div(of.steps, int64_t(steps_of_tile)), partition.tiles_in_all / blocks - of.tile);
  const int64_t begin = tiles * share / kSummaryShares, end = tiles * (share + 1) / kSummaryShares;
  const auto load = [&](int64_t tile) {
    const int64_t index = (of.tile + tile) * blocks + block;
    return SpanMap<Acc>{static_cast<const Map<Acc>*>(partition.maps)[index * kTileChannels + channel],
                        partition.resets != nullptr && partition.resets[index]};
  };
  SpanMap<Acc> total;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kAtOnce) {
    SpanMap<Acc> loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < end) loaded[i] = load(first + i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) total = loaded[i].after(total);
  }
  folded[share][channel] = total;
  __syncthreads();
  const int64_t to = int64_t(block) * kTileChannels + channel;
  if (share != 0 || to >= p.channels) return;
#pragma unroll 1
  for (int i = 1; i < kSummaryShares; ++i) {
    const SpanMap<Acc> next = folded[i][channel];
    if (next.is_reset || isfinite(next.map.decay)) {
      total = next.after(total);
    } else {
      // The state may be so small that it stays finite. One tile after another keeps products as short as a tile.
      const int64_t last = tiles * (i + 1) / kSummaryShares;
#pragma unroll 1
      for (int64_t tile = tiles * i / kSummaryShares; tile < last; ++tile) total = load(tile).after(total);
    }
  }
  p.last_state.template element<Acc>(sequence, to) = total.map.offset;
  p.decay.template element<Acc>(sequence, to) = total.decay();
}

template <typename Scalar>
cudaError_t launch_linear_scan_summary(const LinearScanSummaryParams& params, const SummaryPartition& partition,
                                       cudaStream_t stream) {
  check_known(params.options.candidate_activation);
  using Acc = cuda::AccumulateType<Scalar>;
  static_assert(SummaryTile<Scalar, false>::kSteps == tile_steps(sizeof(Scalar), kSummaryThreadSteps),
                "the host allocates as many maps");
  cudaError_t error = cudaSuccess;
  const auto launch = [&](auto kernel) {
    error = cuda::launch(kernel, partition.tiles_in_all, kThreads, 0, stream, /*uses_pdl=*/false, params, partition);
  };
  // Options are read at run time in plain tiles too: the kernels are bound by memory. Rare dtypes have no kernels for these.
  visit_recurrence_at_run_time(params.recurrence, [&](auto variant) {
    using Variant = decltype(variant);
    if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) {
      if (partition.is_plain) return launch(linear_scan_summary_kernel<Scalar, Variant, true>);
    }
    launch(linear_scan_summary_kernel<Scalar, AnyRecurrence<2, kMaxRecurrenceInputs>, false>);
  });
  if (error != cudaSuccess || partition.maps == nullptr) return error;
  const int64_t fold_blocks = partition.sequences * partition.channel_blocks.template value<int64_t>();
  return cuda::launch(summary_fold_kernel<Acc>, fold_blocks, kSummaryFoldThreads, 0, stream,
                      cuda::has_pdl(summary_fold_kernel<Acc>), params, partition, SummaryTile<Scalar, false>::kSteps);
}

}  // namespace ssm_kernels::linear_scan
