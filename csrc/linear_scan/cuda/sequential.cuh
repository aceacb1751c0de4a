// Device code of the linear scan's sequential kernels, which many chains take: a block's chain, its warps' turns, and the
// copies of the rows. (tile.cuh and tile_carry.cuh serve the tile kernels, which split a chain over blocks.)
//
// A block has one chain: kTileChannels channels of one row of the batch, over all of time. Its warps take segments of kSteps
// steps in turn: warp w takes segments w, w + warps, w + 2 warps and so on. A lane has kLaneChannels neighboring channels. It
//
// 1. starts the copies of its warp's later segments (cp.async), kStages ahead, in aligned blocks of 16 bytes. Rows that start
//    at any element have one block more (shifted_rows.cuh);
// 2. computes the coefficients of all steps of a segment, which need no state;
// 3. waits for the state before the segment, from the same lane of the warp before, through shared memory and an mbarrier;
// 4. takes the state through the steps, passes it to the next warp, and stores the results, a row of 32 lanes at a time.
//
// Chains of neighboring channels share the sectors of memory (32 bytes) in which a row passes from one to the other. Each
// writes a part of such a sector. If the L2 cache evicts it before it has the other part, it reads the sector from memory
// first, and does so again for the other part. Where rows are not whole sectors and a multiprocessor has several chains, these
// are one block, of neighboring channels, and blocks form clusters. Their chains go through time in step: a warp waits before
// step 3 while a neighbor is behind.
//
// While one warp is at step 3 or 4 the others are at 2. Only steps 3 and 4 follow one another, some 160 clocks a segment. Steps
// are computed one after another in the order of the scan, so results depend neither on the number of warps nor on the batch.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/vector_io.cuh"
#include "linear_scan/cuda/any_recurrence.cuh"
#include "linear_scan/cuda/launch.h"
#include "linear_scan/cuda/shifted_rows.cuh"

namespace ssm_kernels::linear_scan {

// Kernels of their own for rows that are not vectors, and for those that share sectors: short scans of other rows fetch fewer
// instructions.
enum class SequentialRows {
  kVectors,
  kShifted,  // rows start at any element, and the chains of a cluster go through time in step
};

template <typename Scalar_, int steps, int tensors, SequentialRows segment_rows>
struct Segment {
  using Scalar = Scalar_;
  static constexpr bool kShifted = segment_rows == SequentialRows::kShifted;
  using Acc = cuda::AccumulateType<Scalar>;
  static constexpr int kSteps = steps;
  static constexpr int kTensors = tensors;  // that pass through shared memory
  static constexpr int kLaneChannels = kTileChannels / cuda::kWarpSize;
  static constexpr int kLanesOfRow = kTileChannels * static_cast<int>(sizeof(Scalar)) / kVectorBytes;
  static constexpr int kRowsAtOnce = cuda::kWarpSize / kLanesOfRow;
  static_assert(kRowsAtOnce >= 1 && kSteps % kRowsAtOnce == 0, "a warp copies whole groups of rows");

  using Row = cuda::Vector<Scalar, kLaneChannels>;  // a lane's part of a row
  using Shifted = ShiftedBlocks<Scalar, kSteps>;
  static_assert(kLaneChannels == 2, "shifted rows are loaded and stored as pairs");
  using TensorRows = Scalar[kSteps][kTileChannels];
  struct Stage {
    TensorRows rows[kTensors];
  };
  struct ShiftedStage {
    __align__(kVectorBytes) unsigned char rows[kTensors][kSteps][Shifted::kRowBytes];
  };
  static_assert(sizeof(Stage) % kVectorBytes == 0, "cp.async copies vectors to every stage");
  static constexpr int kStageBytes = static_cast<int>(kShifted ? sizeof(ShiftedStage) : sizeof(Stage));
  // About 12 KB of copies in flight for each of the 16 warps of a multiprocessor. At the rate of a copy a multiprocessor
  // needs 33 KB for each microsecond of latency.
  static constexpr int kWantedStages = 12 * 1024 / static_cast<int>(sizeof(Stage));
  static constexpr int kStages = kWantedStages < 2 ? 2 : kWantedStages;
  static constexpr int kWarpBytes = kStages * kStageBytes + kTileChannels * static_cast<int>(sizeof(Acc));
};

// A stage in shared memory, of aligned or of shifted rows.
template <typename S>
struct StageRows {
  unsigned char* memory;

  __device__ __forceinline__ typename S::TensorRows& operator[](int tensor) const {
    return reinterpret_cast<typename S::Stage*>(memory)->rows[tensor];
  }
  __device__ __forceinline__ unsigned char* shifted(int tensor) const {
    return reinterpret_cast<typename S::ShiftedStage*>(memory)->rows[tensor][0];
  }
};

// A lane's share of its chain. Shared memory of a chain: the mbarriers, the state before each warp's next segment, the stages.
// A block of shifted rows may process several chains. All blocks have equally many, so some chains have no channels.
template <typename S, bool is_forward>
class Chain {
 public:
  using Scalar = typename S::Scalar;
  using Acc = typename S::Acc;

  // Publishes the state before the first step to the first warp.
  __device__ __forceinline__ Chain(const LinearScanParams& p, const SequentialPartition& partition, unsigned char* memory,
                                   const StateView& initial)
      : warps(S::kShifted ? partition.warps : static_cast<int>(blockDim.x) / cuda::kWarpSize),
        lane(static_cast<int>(threadIdx.x) % cuda::kWarpSize),
        segments(partition.segments),
        channels(p.channels),
        seqlen_(p.seqlen),
        partition_(partition) {
    warp = static_cast<int>(threadIdx.x) / cuda::kWarpSize;
    uint32_t chain = blockIdx.x;
    if constexpr (S::kShifted) {
      slot_ = warp / warps;
      warp -= slot_ * warps;
      chain = chain * partition.block_chains + slot_;
      memory += slot_ * chain_bytes();
      if (chain >= partition.chains) segments = 0, channels = 0;
    }
    const uint32_t row = partition.channel_blocks.divide(chain);
    batch = row;
    block_channel = int64_t(chain - row * partition.channel_blocks.value<uint32_t>()) * kTileChannels;
    channel = block_channel + lane * S::kLaneChannels;
    has_channels = channel < channels;
    ready_ = reinterpret_cast<cuda::Mbarrier*>(memory);
    states_ = reinterpret_cast<Acc*>(memory + kSequentialBarrierBytes) + lane * S::kLaneChannels;
    stages_ = memory + kSequentialBarrierBytes + warps * kTileChannels * sizeof(Acc) + warp * S::kStages * S::kStageBytes;
    if constexpr (S::kShifted) {
      if (warp == 0 && lane < warps) ready_[lane].init(1);
      if (keeps_step() && warp == 0 && lane < 2) set_neighbor(lane);
      if (partition.cluster > 1) cuda::cluster_barrier();
    } else {
      if (static_cast<int>(threadIdx.x) < warps) ready_[threadIdx.x].init(1);
    }
    __syncthreads();
    if (warp == 0) {
      Acc state[S::kLaneChannels];
      load_state(initial, state);
      publish(0, state);
    }
  }

  // How many of the chain's channels exist.
  __device__ __forceinline__ int block_channels() const {
    const int64_t left = channels - block_channel;
    return left < kTileChannels ? static_cast<int>(left) : kTileChannels;
  }
  // How many of the segment's first steps exist before position `end`.
  __device__ __forceinline__ int steps_until(int64_t end, int segment) const {
    const int64_t left = end - int64_t(segment) * S::kSteps;
    return left >= S::kSteps ? S::kSteps : max(static_cast<int>(left), 0);
  }
  __device__ __forceinline__ int steps(int segment) const { return steps_until(seqlen_, segment); }
  __device__ __forceinline__ bool is_last(int segment) const { return segment + 1 == segments; }
  // The step at a segment's position 0.
  __device__ __forceinline__ int64_t first_step(int segment) const {
    const int64_t position = int64_t(segment) * S::kSteps;
    return is_forward ? position : seqlen_ - 1 - position;
  }

  // The distance from a row of a tensor to the next one in the order of the scan, in elements.
  static __device__ __forceinline__ int64_t row_stride(const SequenceView& view) {
    return is_forward ? view.stride_step : -view.stride_step;
  }
  // A tensor's element at a segment's position 0 and one of the block's channels.
  template <typename Element>
  __device__ __forceinline__ Element* element(const SequenceView& view, int segment, int64_t at_channel) const {
    return static_cast<Element*>(view.data) + batch * view.stride_batch + first_step(segment) * view.stride_step + at_channel;
  }

  // Calls work(segment, stage) for each of the warp's segments. copy(segment, stage), called in the order of the segments,
  // starts copies to a stage. work() calls carry(), and release() when no lane of the warp reads the stage any more.
  template <typename Copy, typename Work>
  __device__ __forceinline__ void for_each_segment(const Copy& copy, const Work& work) {
#pragma unroll(S::kShifted ? 1 : S::kStages)
    for (int i = 0; i < S::kStages; ++i) {
      if (warp + i * warps < segments) copy(warp + i * warps, stage(i));
      cuda::cp_async_commit();
    }
    int at = 0;
#pragma unroll 1
    for (int segment = warp; segment < segments; segment += warps) {
      cuda::cp_async_wait<S::kStages - 1>();
      __syncwarp();  // a lane reads what others copied
      const StageRows<S> rows = stage(at);
      at = at + 1 == S::kStages ? 0 : at + 1;
      work(segment, rows, [&] {
        __syncwarp();
        if (const int later = segment + S::kStages * warps; later < segments) copy(later, rows);
        cuda::cp_async_commit();
      });
    }
  }

  // The state before the warp's next segment.
  __device__ __forceinline__ void wait_for_state(int segment, Acc (&state)[S::kLaneChannels]) {
    if (keeps_step()) wait_for_neighbors(segment);
    ready_[warp].wait(turn_++);
    const Acc* const source = states_ + warp * kTileChannels;
#pragma unroll
    for (int j = 0; j < S::kLaneChannels; ++j) state[j] = source[j];
  }
  // Passes the state after a segment on. The next warp has read its last state: this one follows from it.
  __device__ __forceinline__ void pass_on(int segment, const Acc (&state)[S::kLaneChannels]) {
    if (!is_last(segment)) publish(warp + 1 == warps ? 0 : warp + 1, state);
    if (keeps_step() && lane < 2) {
      if (const uint32_t passed = neighbors().passed_by_this[lane]; passed != kNoNeighbor) cuda::add_cluster(passed, 1);
    }
  }
  // Blocks of a cluster end together, because others write to their shared memory. Called by all threads.
  __device__ __forceinline__ void finish() const {
    if (S::kShifted && partition_.cluster > 1) cuda::cluster_barrier();
  }

  // Loads the lane's channels of a state; missing elements are zero.
  __device__ __forceinline__ void load_state(const StateView& view, Acc (&state)[S::kLaneChannels]) const {
#pragma unroll
    for (int j = 0; j < S::kLaneChannels; ++j) {
      state[j] = view.data != nullptr && channel + j < channels ? *state_element(view, j) : Acc(0);
    }
  }
  __device__ __forceinline__ void store_state(const StateView& view, const Acc (&state)[S::kLaneChannels]) const {
    if (view.data == nullptr) return;
#pragma unroll
    for (int j = 0; j < S::kLaneChannels; ++j) {
      if (channel + j < channels) *state_element(view, j) = state[j];
    }
  }

  int warp;  // of the chain
  const int warps, lane;
  int segments;
  int64_t channels;
  int64_t batch, block_channel;
  int64_t channel;    // the lane's first
  bool has_channels;  // any of the lane's; where rows are vectors, all of them or none

 private:
  // The chains of the cluster with the channels below (0) and above (1), in the same row of the batch.
  struct Neighbors {
    uint32_t passed[2];          // how many segments they have passed
    uint32_t passed_by_this[2];  // the addresses of their `passed` for this chain
  };
  static_assert(kNeighborsAt + sizeof(Neighbors) == kSequentialBarrierBytes, "neighbors come before the states");
  // Segments that a chain may be ahead of its neighbors. A round of turns more was 3 to 6 % slower where a multiprocessor has
  // several chains. One chain alone gets it, because the path from turn to turn limits its speed.
  static constexpr uint32_t kMostAhead = 2;
  static constexpr uint32_t kNeverBehind = 1u << 31, kNoNeighbor = 0xffffffff;

  __device__ __forceinline__ int chain_bytes() const { return kSequentialBarrierBytes + warps * S::kWarpBytes; }
  __device__ __forceinline__ bool keeps_step() const { return S::kShifted && partition_.cluster * partition_.block_chains > 1; }
  __device__ __forceinline__ volatile Neighbors& neighbors() const {
    return *reinterpret_cast<volatile Neighbors*>(reinterpret_cast<unsigned char*>(ready_) + kNeighborsAt);
  }
  __device__ __forceinline__ void set_neighbor(int side) const {
    const int rank = cuda::cluster_rank(), chains = partition_.block_chains, all = partition_.cluster * chains;
    const int own = rank * chains + slot_, other = own + 2 * side - 1;  // numbers in the cluster
    const bool exists = other >= 0 && other < all && (side == 0 ? block_channel > 0 : block_channel + kTileChannels < channels);
    auto& of = neighbors();
    of.passed[side] = exists ? 0 : kNeverBehind;
    uint32_t address = kNoNeighbor;
    if (exists) {
      const int other_rank = other / chains, other_slot = other - other_rank * chains;
      const auto* const passed = reinterpret_cast<const unsigned char*>(const_cast<const uint32_t*>(&of.passed[1 - side]));
      address = cuda::cluster_address(passed + (other_slot - slot_) * chain_bytes(), other_rank);
    }
    of.passed_by_this[side] = address;
  }
  __device__ __forceinline__ void wait_for_neighbors(int segment) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const auto& of = neighbors();
    const uint32_t most_ahead = kMostAhead + (partition_.block_chains > 1 ? 0 : static_cast<uint32_t>(warps));
    while (min(of.passed[0], of.passed[1]) + most_ahead <= static_cast<uint32_t>(segment)) __nanosleep(100);
#endif
  }
  __device__ __forceinline__ StageRows<S> stage(int i) const { return {stages_ + i * S::kStageBytes}; }
  __device__ __forceinline__ Acc* state_element(const StateView& view, int j) const {
    return static_cast<Acc*>(view.data) + batch * view.stride_sequence + (channel + j) * view.stride_channel;
  }
  __device__ __forceinline__ void publish(int to, const Acc (&state)[S::kLaneChannels]) {
    Acc* const target = states_ + to * kTileChannels;
#pragma unroll
    for (int j = 0; j < S::kLaneChannels; ++j) target[j] = state[j];
    __syncwarp();
    if (lane == 0) ready_[to].arrive();
  }

  const int64_t seqlen_;
  const SequentialPartition& partition_;
  int slot_ = 0;  // the chain's number in its block
  int turn_ = 0;
  cuda::Mbarrier* ready_;
  Acc* states_;
  unsigned char* stages_;
};

// The rows of a tensor that a lane copies: 16 bytes of each kRowsAtOnce-th row. Segments are copied in the order of the warp's
// turns. Addresses advance by strides that are read where they are needed: multiples of strides would take registers.
template <typename S, bool is_forward>
struct CopiedRows {
  using Scalar = typename S::Scalar;
  using ChainOf = Chain<S, is_forward>;
  using Vector = cuda::Vector<Scalar, kVectorBytes / static_cast<int>(sizeof(Scalar))>;

  const Scalar* source;

  static __device__ __forceinline__ int row(int lane) { return lane / S::kLanesOfRow; }
  static __device__ __forceinline__ int column(int lane) { return lane % S::kLanesOfRow * Vector::kSize; }

  CopiedRows() = default;
  // `earlier` steps before those of the segments. An absent tensor has no rows.
  __device__ __forceinline__ CopiedRows(const SequenceView& view, const ChainOf& chain, int earlier = 0)
      : source(chain.template element<Scalar>(view, chain.warp, chain.block_channel + column(chain.lane)) -
               earlier * view.stride_step + row(chain.lane) * ChainOf::row_stride(view)) {}

  // Copies the first `steps` rows of the warp's next segment; the others become zero.
  __device__ __forceinline__ void copy(const SequenceView& view, const ChainOf& chain, int lane, int steps,
                                       Scalar (&target)[S::kSteps][kTileChannels]) {
    const int rows = column(lane) < chain.block_channels() ? steps : 0;
    const int64_t stride = ChainOf::row_stride(view);
    const Scalar* from = source;
#pragma unroll
    for (int i = 0; i < S::kSteps; i += S::kRowsAtOnce) {
      cuda::cp_async(&target[i + row(lane)][column(lane)], from, i + row(lane) < rows ? cuda::kCpAsyncBytes : 0);
      from += S::kRowsAtOnce * stride;
    }
    source += chain.warps * S::kSteps * stride;
  }
  // The same for an absent tensor.
  static __device__ __forceinline__ void clear(int lane, Scalar (&target)[S::kSteps][kTileChannels]) {
#pragma unroll
    for (int i = 0; i < S::kSteps; i += S::kRowsAtOnce) Vector::zero().store(&target[i + row(lane)][column(lane)]);
  }
};

// Copies, where rows start at any element: of all tensors of a stage, in a loop, whose code is short. view(i) is tensor i, with
// `data` of the row that position 0 reads, and steps(i) the number of its rows in the segment.
template <typename S, bool is_forward, typename View, typename Steps>
__device__ __forceinline__ void copy_shifted_rows(const Chain<S, is_forward>& chain, int segment, const StageRows<S>& stage,
                                                  const View& view, const Steps& steps) {
  const int lane = cuda::opaque(chain.lane);
#pragma unroll 1
  for (int i = 0; i < S::kTensors; ++i) {
    const SequenceView of = view(i);
    S::Shifted::copy(chain.template element<typename S::Scalar>(of, segment, chain.block_channel),
                     Chain<S, is_forward>::row_stride(of), chain.block_channels(), steps(i), lane, stage.shifted(i));
  }
}

// A lane's channels of `count` tensors of a stage in registers, for some consecutive steps. number(i) is the tensor's number in
// the stage; view(number) as above.
template <typename S, int count>
struct LaneRows {
  // Half of the steps, unless the rows take few registers.
  static constexpr int kSteps = count * S::kSteps * S::Row::kBytes > 64 ? S::kSteps / 2 : S::kSteps;
  static_assert(S::kSteps % kSteps == 0, "a segment has whole groups of steps");
  typename S::Row rows[count][kSteps];

  template <bool is_forward, typename Number, typename View>
  __device__ __forceinline__ void load(const SequentialPartition& partition, const Chain<S, is_forward>& chain, int segment,
                                       const StageRows<S>& stage, int begin, const Number& number, const View& view) {
    if constexpr (S::kShifted) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const SequenceView of = view(number(i));
        S::Shifted::load(chain.template element<typename S::Scalar>(of, segment, chain.block_channel),
                         Chain<S, is_forward>::row_stride(of), chain.lane, stage.shifted(number(i)), partition.reads_pairs,
                         begin, rows[i]);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < count; ++i) rows[i][s] = S::Row::load(&stage[number(i)][begin + s][chain.lane * S::kLaneChannels]);
      }
    }
  }
};

// Stores the rows of a result in a segment: `steps` rows, of which the lane has row s in values(s). All lanes of the warp call
// this, with the same `steps`.
template <typename S, typename Element, bool is_forward, typename Values>
__device__ __forceinline__ void store_rows(const SequentialPartition& partition, const SequenceView& view,
                                           const Chain<S, is_forward>& chain, int segment, int steps, const Values& values) {
  using Pair = cuda::Vector<Element, S::kLaneChannels>;
  const int64_t stride = Chain<S, is_forward>::row_stride(view);
  if (!S::kShifted || partition.stores_pairs) {
    Element* target = chain.template element<Element>(view, segment, chain.channel);
    const int rows = chain.has_channels ? steps : 0;
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      if (s < rows) Pair(values(s)).store_once(target);
      target += stride;
    }
  } else {
    ShiftedStores<Element> out(chain.template element<Element>(view, segment, chain.block_channel), stride,
                               chain.block_channels(), steps, cuda::opaque(chain.lane));
    uint32_t before[S::kSteps];
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) before[s] = out.before(values(s));
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) out.store_next(s % 2, s, values(s), before[s]);
  }
}

// The inputs of a segment's steps for one lane. Narrow inputs, which do not broadcast, come from a stage's rows, wide ones from
// global memory. Backward does not read the input that is b itself.
template <typename S, typename Variant, bool is_forward>
struct SegmentInputs {
  using Scalar = typename S::Scalar;
  using Acc = typename S::Acc;
  using ChainOf = Chain<S, is_forward>;
  static constexpr int kInputs = static_cast<int>(Variant::kNames.size());
  static constexpr int kNarrow = static_cast<int>(Variant::kFirstBroadcast);
  static constexpr int kWide = kInputs - kNarrow;
  static constexpr int kStaged = kStagedInputs<Variant, is_forward>;
  static constexpr int kChannels = S::kLaneChannels;

  const LinearScanParams& p;
  int steps;     // for which the lane has inputs
  int channels;  // of wide inputs that are loaded one by one; none where rows are pairs
  const char* wide[kWide > 0 ? kWide : 1];

  __device__ __forceinline__ SegmentInputs(const LinearScanParams& p, const ChainOf& chain, int segment, int steps,
                                           bool reads_pairs)
      : p(p),
        steps(steps),
        channels(!S::kShifted || reads_pairs          ? 0
                 : chain.channel + 1 < chain.channels ? 2
                                                      : 1) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const SequenceView& view = p.inputs[kNarrow + i];
      wide[i] = view.is_accumulate
                    ? reinterpret_cast<const char*>(chain.template element<Acc>(view, segment, chain.channel))
                    : reinterpret_cast<const char*>(chain.template element<Scalar>(view, segment, chain.channel));
    }
  }

  // The inputs of step s; the first of `rows` are those of narrow inputs. Called for each step, in order.
  template <int count>
  __device__ __forceinline__ void next(int s, const LaneRows<S, count>& rows, Acc (&x)[kChannels][kInputs]) {
    static_assert(count >= kStaged, "a row for each narrow input that is read");
#pragma unroll
    for (int i = 0; i < kStaged; ++i) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) x[j][i] = rows.rows[i][s % LaneRows<S, count>::kSteps].accumulate(j);
    }
    if constexpr (kStaged < kNarrow) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) x[j][kNarrow - 1] = 0;
    }
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const SequenceView& view = p.inputs[kNarrow + i];
      auto values = cuda::Vector<Acc, kChannels>::zero();
      if (s < steps && channels > 0) {
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          if (j >= channels) continue;
          values.set(j, view.is_accumulate ? reinterpret_cast<const Acc*>(wide[i])[j]
                                           : cuda::to_accumulate(reinterpret_cast<const Scalar*>(wide[i])[j]));
        }
      } else if (s < steps) {
        if (view.is_accumulate) {
          values = cuda::Vector<Acc, kChannels>::load(reinterpret_cast<const Acc*>(wide[i]));
        } else {
          const auto row = S::Row::load(reinterpret_cast<const Scalar*>(wide[i]));
#pragma unroll
          for (int j = 0; j < kChannels; ++j) values.set(j, row.accumulate(j));
        }
      }
      wide[i] += ChainOf::row_stride(view) * static_cast<int64_t>(view.is_accumulate ? sizeof(Acc) : sizeof(Scalar));
#pragma unroll
      for (int j = 0; j < kChannels; ++j) x[j][kNarrow + i] = values[j];
    }
  }
};

// The blocks of a cluster: of those with the fewest waves the most. One if a query fails.
template <typename Kernel>
int cluster_blocks(Kernel kernel, int threads, int shared_bytes, int64_t blocks) {
  int best = 1;
  int64_t least_waves = std::numeric_limits<int64_t>::max();
  for (int cluster = 8; cluster > 1; cluster /= 2) {
    const int64_t at_a_time = int64_t(cluster) * cuda::resident_clusters(kernel, threads, shared_bytes, cluster);
    if (at_a_time == 0) continue;
    const int64_t waves = ceil_div(round_up(blocks, cluster), at_a_time);
    if (waves >= least_waves) continue;
    best = cluster;
    least_waves = waves;
  }
  return best;
}

// Calls launch(variant, rows) for the kernel that takes a call and returns its error. `rows` is a constant SequentialRows. Rare
// calls, with options or forward in float16, take the kernels of any rows, which read options at run time, to keep the build
// short. Forward in float16 has one kernel for all recurrences of two inputs; backward would take 2.7 times as long.
template <typename Scalar, bool is_forward, typename Launch>
cudaError_t launch_sequential_variant(const LinearScanParams& params, const SequentialPartition& partition,
                                      const Launch& launch) {
  check_known(params.options.candidate_activation);
  using AnyRows = std::integral_constant<SequentialRows, SequentialRows::kShifted>;
  constexpr bool kIsRare = std::is_same_v<Scalar, __half> && is_forward;
  cudaError_t error = cudaSuccess;
  if constexpr (!kIsRare) {
    if (params.options.are_default()) {
      visit_default_recurrence(params.recurrence, [&](auto variant) {
        error = partition.is_shifted || partition.keeps_step
                    ? launch(variant, AnyRows())
                    : launch(variant, std::integral_constant<SequentialRows, SequentialRows::kVectors>());
      });
      return error;
    }
  }
  visit_recurrence_at_run_time(params.recurrence, [&](auto variant) {
    using Variant = decltype(variant);
    using Taken = std::conditional_t<kIsRare && Variant::kNames.size() == 2, AnyRecurrence<2, 2>, Variant>;
    // Other recurrences have no options.
    if constexpr (kIsRare || std::is_base_of_v<RuntimeOptions, Variant>) error = launch(Taken(), AnyRows());
  });
  return error;
}

// Launches a block for each chain, or, where chains keep step, for all chains of a multiprocessor. The kernel's registers leave
// room for `most_warps` warps in a multiprocessor.
template <typename S, typename Kernel, typename Params>
cudaError_t launch_chains(Kernel kernel, int most_warps, const Params& params, SequentialPartition partition,
                          cudaStream_t stream) {
  partition.segments = static_cast<int>((params.seqlen + S::kSteps - 1) / S::kSteps);
  partition.warps = sequential_warps(partition, most_warps, S::kWarpBytes);
  const int chain_bytes = kSequentialBarrierBytes + partition.warps * S::kWarpBytes;
  const bool keeps_step = S::kShifted && partition.keeps_step;
  if (keeps_step) {
    const int64_t of_multiprocessor = ceil_div(int64_t(partition.chains), int64_t(partition.multiprocessors));
    const int fit = std::min(most_warps / partition.warps, partition.block_bytes / chain_bytes);
    partition.block_chains = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(of_multiprocessor, fit)));
  }
  const int threads = partition.block_chains * partition.warps * cuda::kWarpSize, bytes = partition.block_chains * chain_bytes;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  int64_t blocks = ceil_div(int64_t(partition.chains), int64_t(partition.block_chains));
  if (keeps_step) partition.cluster = cluster_blocks(kernel, threads, bytes, blocks);
  blocks = round_up(blocks, partition.cluster);
  return cuda::launch_clusters(kernel, blocks, threads, bytes, partition.cluster, stream, params, partition);
}

}  // namespace ssm_kernels::linear_scan
