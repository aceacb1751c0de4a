// States between chunks (mamba_ssm's stages chunk_state and state_passing), for backward and for segments.
//
// The kernel scans along time. A chunk decays the state and adds scaled head rows times group rows:
//
//   forward in time   S <- e^(s_l) S + sum_j c_j e^(s_l - s_j) x_j B_j^T       S: the state before the chunk
//   backward in time  T <- e^(s_l) T + sum_i e^(s_i) g_i C_i^T                 T: the gradient of the state after the chunk
//
// with s the cumulative log decay of the chunk, l its last step, c the gain, g the gradient of y. A reset in the chunk makes
// the chunk's decay zero in both directions; the sum then has the steps after the last reset (S) or before the first one (T).
//
// StatesPass says which of three things a launch does:
//
//   kBwd         half of the blocks compute S, the others T. Before each chunk the state is rounded to the inputs' type and
//                stored as a swizzled tile, for the kernel that processes all chunks at once.
//   kBwdSummary  where backward has fewer work tiles than the device has room for, each is split into segments of equally many
//                chunks, and each block takes one. This launch comes first and stores each segment's summary: the state after
//                it, begun with zero, and its map (span_map.cuh). kBwd folds the summaries of earlier segments, in order, into
//                its first state. Launched for one direction alone, all blocks compute S, or all compute T.
//   kFwdSummary  computes forward's summaries (scheduler.cuh): of a block's one segment, if any, whose work tile continues in
//                the next block's range.
//
// Which rows these are is a type, `Operands`: head_rows(p, is_reverse) and group_rows(p, is_reverse) are views of x and B, or
// backward in time of g and C. scales(tables, is_reverse) are the factors of the head rows. The parameters of backward have, as
// SsdBwdParams, `states` and `grad_states` for S and T, `state_tiles`, `grad_final_states` and `grad_initial_states`.
//
// Two consumer warpgroups hold a state tile each, in registers. Producer warps copy rows to a pipeline and compute the tables
// of decays (cuda/pipeline.cuh). For fp16 and bf16, backward splits its scaled inputs into hi and lo parts; a state is
// therefore rounded only when it is stored. Forward's summary rounds the scaled inputs, as forward does. With wgmma a rounded
// state goes to shared memory, and TMA stores it while products run. With mma.sync it goes through the shared memory of the
// chunk's head rows, 64 columns at a time. fp32 states are stored from registers: the lanes' pairs of values fill whole
// sectors.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/chunked/launch_staged.cuh"
#include "cuda/chunked/scheduler.cuh"
#include "cuda/chunked/span_map.cuh"
#include "cuda/chunked/warpgroup_layout.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"

namespace ssm_kernels::cuda::chunked {

enum class StatesPass { kFwdSummary, kBwdSummary, kBwd };

template <typename Scalar, int dstate>
struct StatesStage {
  using Layout = WarpgroupLayout<dstate>;
  SmemTile<Layout::kColumns, sizeof(Scalar)> group_rows[Layout::kColumnBlocks];
  SmemTile<kStateRows, sizeof(Scalar)> head_rows[Layout::kRowBlocks];
  TablesOf<Scalar> tables[kWarpgroups];
};
template <int dstate>
struct RoundedStates {
  SmemTile<dstate> rounded[kWarpgroups][2];  // of this chunk and of the previous one, which TMA may still read
};
template <typename Scalar, int dstate, StatesPass pass, typename Mma>
using StatesShared =
    StagedShared<std::conditional_t<pass != StatesPass::kFwdSummary && Mma::kIsAsync, RoundedStates<dstate>, Empty>,
                 StatesStage<Scalar, dstate>, Mma, pass == StatesPass::kFwdSummary && Mma::kIsAsync ? 6 : 4>;

// The segment of forward that a block summarizes.
struct FwdSegment : WorkSpan {
  static constexpr bool is_reverse = false;

  __device__ __forceinline__ explicit FwdSegment(const WorkSpan& span) : WorkSpan(span) {}
  static __device__ __forceinline__ int chunk_at(int position) { return position; }
};

// A block's segment of a work tile in backward. The first blocks have the first segments of all work tiles, forward in time and
// then backward, the next ones the second segments, and so on: blocks that run at the same time read the same group rows. A
// launch for one direction has no blocks for the other. All segments of a work tile have equally many chunks; the last ones may
// have fewer, or none.
struct DirectedSegment : WorkSpan {
  int index;  // in scan order
  bool is_reverse;
  int first_chunk;  // of the sequence, in time

  template <typename Params>
  __device__ __forceinline__ DirectedSegment(const Params& p, const WorkPartition& partition)
      : WorkSpan(p, partition, blockIdx.x % static_cast<unsigned>(partition.work_tiles)) {
    const unsigned segment = blockIdx.x / static_cast<unsigned>(partition.work_tiles);
    const bool has_both = partition.directions == Directions::kBoth;
    index = static_cast<int>(has_both ? segment / kDirections : segment);
    is_reverse = has_both ? segment % kDirections != 0 : partition.directions == Directions::kReverse;
    const int length = (chunks + partition.segments - 1) / partition.segments;
    const int begin = min(index * length, chunks), end = min(begin + length, chunks);
    first_chunk = is_reverse ? chunks - end : begin;
    narrow(first_chunk, end - begin);
  }

  // In scan order.
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? chunks - 1 - position : position; }
};

template <typename Scalar, int dstate, StatesPass pass, typename Mma, typename Gates, typename Operands, typename Map>
struct StatePassing {
  static constexpr bool kIsFwd = pass == StatesPass::kFwdSummary, kIsSummary = pass != StatesPass::kBwd;
  // A forward summary takes little time for a chunk: with wgmma it needs twice the producers to keep up.
  static constexpr int kProducerScale = kIsFwd && Mma::kIsAsync ? 2 : 1;
  // setmaxnreg needs whole warpgroups of producers. Without it, one copying warp leaves more registers to each thread.
  static constexpr bool kTradesRegisters = Mma::kIsAsync || kIsFp32<Scalar>;
  static constexpr int kCopyWarps = kTradesRegisters ? 2 * kProducerScale : 1, kCopyThreads = kCopyWarps * kWarpSize;
  static constexpr int kTableWarps = kProducerScale;  // for each state tile
  static constexpr int kProducerWarps = kCopyWarps + kWarpgroups * kTableWarps;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + kProducerWarps * kWarpSize;
  // Shared::at() aligns further. In fp32 the memory begins where that of the forward kernel in the same module does.
  static constexpr int kMemoryAlignment = kIsFp32<Scalar> ? kTicketBytes : 16;
  // Where a policy is not compiled, the kernel is empty.
  static constexpr bool kIsCompiled = Mma::kAreCompiled;
  static constexpr int kLaunchThreads = kIsCompiled ? kThreads : kWarpSize;
  // Registers of a thread after setmaxnreg.
  static constexpr int kConsumerRegisters = kProducerScale == 2 ? 160 : 208,
                       kProducerRegisters =
                           producer_registers<kConsumerThreads, kConsumerRegisters, kProducerWarps * kWarpSize>();
  static constexpr bool kSplitsInputs = !kIsFwd;

  using Params = std::conditional_t<kIsFwd, typename Gates::FwdParams, typename Gates::BwdParams>;
  using Work = std::conditional_t<kIsFwd, Schedule, WorkPartition>;
  using Segment = std::conditional_t<kIsFwd, FwdSegment, DirectedSegment>;
  using Layout = WarpgroupLayout<dstate>;
  using Shared = StatesShared<Scalar, dstate, pass, Mma>;
  using Stage = typename Shared::Stage;
  using TileState = State<Layout::kColumns>;
  using SwizzledState = SmemTile<Layout::kColumns, sizeof(Scalar)>;
  using HeadTile = SmemTile<kStateRows, sizeof(Scalar)>;
  using FragmentPairs = cuda::FragmentPairs<sizeof(Scalar)>;

  const Params& p;
  const Work& work;
  Shared& shared;
  const Segment at;

  __device__ __forceinline__ int stages() const { return kIsFwd ? work.stages : Shared::stages(work.stages); }

  // Run by the producer warps.
  __device__ __forceinline__ void produce() {
    const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads, warp = thread / kWarpSize;
    PipelineState pipeline;
    if (warp < kCopyWarps) {
      produce_rows(thread, pipeline);
      return;
    }
    const int index = (warp - kCopyWarps) % kWarpgroups;
    produce_chunk_cumsum<Gates, 2, kIsFwd>(
        p, at, StateTile(p, work, at, index).head, WarpShare<kTableWarps>{(warp - kCopyWarps) / kWarpgroups}, stages(),
        pipeline, shared.full, shared.empty, [&](int position) { return at.chunk_at(position); },
        [&](int stage) -> TablesOf<Scalar>& { return shared.stage(stage).tables[index]; });
  }

  // Run by a consumer warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const StateTile state_tile(p, work, at, index);
    const FragmentLane lane;
    const FragmentPairs pairs(lane);
    TileState state;
    if constexpr (kIsSummary) {
      state.clear();
    } else {
      begin(state, state_tile, index, lane);
    }
    Map segment_map;
    SwizzledState* const targets = first_target(state_tile);
    const auto target_of = [&](int position) { return targets + at.chunk_at(position) * target_stride(); };
    const bool starts_copies = threadIdx.x % kWarpgroupThreads == 0 && state_tile.is_there();

    PipelineState pipeline;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      shared.full[pipeline.stage].wait(pipeline.phase);
      Stage& stage = shared.stage(pipeline.stage);
      HeadTile& head_rows = stage.head_rows[Layout::row_block(index)];
      const auto& tables = stage.tables[index];
      const float (&scales)[kChunk] = Operands::scales(tables, at.is_reverse);
      if constexpr (kIsFp32<Scalar>) {
        if (tables.starts_with_reset && !at.is_reverse) state.clear();
      }

      if constexpr (Mma::kIsAsync && !kIsSummary) {
        state.template round<Scalar>(shared.rounded[index][position % 2], pairs);
      }
      const auto group_rows = Mma::describe(stage.group_rows[Layout::column_block(index)], lane);
      if constexpr (kIsSummary) segment_map.append(p, tables);
      if constexpr (kIsFp32<Scalar>) {
        if (!kIsSummary && state_tile.is_there()) state.template round<Scalar>(*target_of(position), pairs);
        if (has_reset(p, tables)) {
          state.clear();
        } else {
          state.decay(tables.chunk_decay);
        }
        // One group of steps at a time: when unrolled, ptxas serializes the whole chain of mma instructions.
#pragma unroll 1
        for (int j = 0; j < kStepGroups; ++j) {
          OperandA<Scalar> x, scaled;
          load_inputs(x, head_rows, j, lane);
          scale_inputs<Scalar>(x, scales, j, lane, scaled);
          gemm<Scalar, true>(state.values, scaled, rows_of(group_rows, j), true);
        }
      } else {
        OperandA<Scalar> x[kStepGroups], scaled[kStepGroups], lo[kStepGroups];
        const auto scale = [&](int j) {
          scale_inputs<Scalar>(x[j], scales, j, lane, scaled[j], kSplitsInputs ? lo[j] : nullptr);
        };
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          load_inputs(x[j], head_rows, j, lane);
          if constexpr (Mma::kIsAsync) scale(j);
        }
        if constexpr (!Mma::kIsAsync && !kIsSummary) {
          if (state_tile.is_there()) write_panels(state, head_rows, pairs, index, *target_of(position));
        }
        state.decay(tables.chunk_decay);
        Mma::fence();
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          if constexpr (!Mma::kIsAsync) scale(j);
          gemm<Scalar, true>(state.values, scaled[j], rows_of(group_rows, j), j > 0 || !has_reset(p, tables));
          if constexpr (!Mma::kIsAsync && kSplitsInputs) {
            gemm<Scalar, true>(state.values, lo[j], rows_of(group_rows, j), true);
          }
        }
        if constexpr (Mma::kIsAsync && kSplitsInputs) {
#pragma unroll
          for (int j = 0; j < kStepGroups; ++j) gemm<Scalar, true>(state.values, lo[j], rows_of(group_rows, j), true);
        }
      }
      Mma::commit();

      if constexpr (Mma::kIsAsync && !kIsSummary) {
        // TMA has read the tile of the previous chunk, which the next round() overwrites.
        tma_store_wait_read<0>();
        Mma::publish();
        sync_warpgroup(index);
        const SwizzledState& rounded = shared.rounded[index][position % 2];
        tma_store(target_of(position), &rounded, sizeof(rounded), starts_copies);
      }
      Mma::template wait<0>(state.values);
      shared.empty[pipeline.stage].arrive();
      pipeline.advance(stages());
    }
    if constexpr (kIsSummary) {
      summaries().store(state, segment_map, summary_index(blockIdx.x, index));
    } else {
      const bool is_last = at.index + 1 == work.segments;
      if (at.is_reverse && is_last && p.grad_initial_states != nullptr) {
        state.store(p, states_of(p, p.grad_initial_states, at.entry), state_tile, lane);
      }
      if constexpr (Mma::kIsAsync) tma_store_wait_read<0>();
    }
  }

 private:
  // The rows that a chunk adds to the state. In fp32, rows on the other side of a reset are zeros in shared memory rather than
  // multiplied by zero, which would let NaN through.
  struct Rows {
    int first, end;
  };
  __device__ __forceinline__ Rows rows_of_chunk(int chunk) const {
    const int steps = at.steps_of(chunk);
    if (!kIsFp32<Scalar> || p.resets == nullptr) return {0, steps};
    const uint8_t* const resets = at.resets(p, chunk);
    unsigned begins[kChunk / kWarpSize];
#pragma unroll
    for (int i = 0; i < kChunk / kWarpSize; ++i) {
      const int step = i * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
      begins[i] = __ballot_sync(kAllLanes, step < steps && resets[step] != 0);
    }
    if ((begins[0] | begins[1]) == 0) return {0, steps};
    if (at.is_reverse) return {0, begins[0] != 0 ? __ffs(begins[0]) - 1 : kWarpSize + __ffs(begins[1]) - 1};
    return {begins[1] != 0 ? kChunk - 1 - __clz(begins[1]) : kWarpSize - 1 - __clz(begins[0]), steps};
  }

  // Run by the warps that copy.
  __device__ __forceinline__ void produce_rows(int thread, PipelineState& pipeline) const {
    const RowsView &group_rows = Operands::group_rows(p, at.is_reverse), &head_rows = Operands::head_rows(p, at.is_reverse);
    const int first = at.chunks > 0 ? at.chunk_at(0) : 0;
    using GroupCopier = RowCopier<Scalar, Layout::kColumns, kCopyThreads>;
    using TileCopier = RowCopier<Scalar, kStateRows, kCopyThreads>;
    const auto group_copier = [&](int block) {
      const int column = block * Layout::kColumns;
      return GroupCopier(at.template rows<Scalar>(group_rows, at.group, first) + column, group_rows.stride_step,
                         p.dstate - column, thread);
    };
    const auto tile_copier = [&](int index) {
      const StateTile state_tile(p, work, at, index);
      return TileCopier(at.template rows<Scalar>(head_rows, state_tile.head, first) + state_tile.first_row,
                        head_rows.stride_step, state_tile.rows, thread);
    };
    GroupCopier copy_group_rows[kWarpgroups] = {group_copier(0), group_copier(1)};
    TileCopier copy_head_rows[kWarpgroups] = {tile_copier(0), tile_copier(1)};
    constexpr int kPending = Shared::kMaxStages - 2;
    produce_copies<kPending>(at.chunks, stages(), pipeline, shared.full, shared.empty, [&](int position, int stage) {
      Stage& target = shared.stage(stage);
      const Rows rows = rows_of_chunk(at.chunk_at(position));
#pragma unroll
      for (int block = 0; block < Layout::kColumnBlocks; ++block) {
        copy_group_rows[block].copy(target.group_rows[block], rows.end, group_rows.stride_step, at.is_reverse, rows.first);
      }
#pragma unroll
      for (int block = 0; block < Layout::kRowBlocks; ++block) {
        copy_head_rows[block].copy(target.head_rows[block], rows.end, head_rows.stride_step, at.is_reverse, rows.first);
      }
    });
  }

  // The tile of a position is at first_target() + chunk_at(position) * target_stride(). A summary stores none.
  __device__ __forceinline__ SwizzledState* first_target(const StateTile& state_tile) const {
    if constexpr (kIsSummary) {
      return nullptr;
    } else {
      return static_cast<SwizzledState*>(at.is_reverse ? p.grad_states : p.states) + state_tile.head * work.row_blocks +
             state_tile.first_row / kStateRows + (first_chunk_index(p, at.entry) + at.first_chunk) * target_stride();
    }
  }
  __device__ __forceinline__ int64_t target_stride() const {
    if constexpr (kIsSummary) {
      return 0;
    } else {
      return p.state_tiles;
    }
  }

  // Stores the rounded state through the tile of the chunk's head rows, which all threads of the warpgroup have read.
  __device__ __forceinline__ void write_panels(const TileState& state, HeadTile& tile, const FragmentPairs& pairs, int index,
                                               SwizzledState& target) const {
    constexpr int kVectors = sizeof(HeadTile) / sizeof(uint4);
    static_assert(sizeof(HeadTile) % SwizzledState::kPanelBytes == 0, "panels of the state take the place of the head rows");
    const int thread = threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int panel = 0; panel < Layout::kColumns / kStateRows; ++panel) {
      sync_warpgroup(index);
      state.template round<Scalar>(tile, pairs, panel);
      sync_warpgroup(index);
      const auto* const source = reinterpret_cast<const uint4*>(&tile) + thread;
      auto* const vectors = reinterpret_cast<uint4*>(&target) + panel * kVectors + thread;
#pragma unroll
      for (int i = 0; i < kVectors; i += kWarpgroupThreads) __stcg(vectors + i, source[i]);
    }
  }

  // The state before the segment: the given one, and the summaries of earlier segments.
  __device__ __forceinline__ void begin(TileState& state, const StateTile& state_tile, int index,
                                        const FragmentLane& lane) const {
    state.load(p, states_of(p, at.is_reverse ? p.grad_final_states : p.initial_states, at.entry), state_tile, lane);
    const int blocks = static_cast<int>(work.work_tiles) * kDirections;  // from one segment of a work tile to the next
    const int block = static_cast<int>(blockIdx.x);
    summaries().fold_into(state, summary_index(block - at.index * blocks, index), summary_index(block, index),
                          summary_index(blocks, 0));
  }

  __device__ __forceinline__ SegmentSummaries<Layout::kColumns, Map> summaries() const { return {work.states, work.maps}; }
  static __device__ __forceinline__ int summary_index(int block, int index) { return block * kWarpgroups + index; }
};

template <typename States>
__global__ void __launch_bounds__(States::kLaunchThreads, 1)
    state_passing_kernel(const __grid_constant__ typename States::Params p,
                         const __grid_constant__ typename States::Work work) {
  if constexpr (States::kIsCompiled) {
    extern __shared__ __align__(States::kMemoryAlignment) unsigned char memory[];
    auto& shared = States::Shared::at(memory);
    const auto run = [&](const typename States::Segment& segment) {
      States states{p, work, shared, segment};
      if (threadIdx.x < states.stages()) {
        shared.full[threadIdx.x].init(States::kCopyThreads + kWarpgroups * kWarpSize);
        shared.empty[threadIdx.x].init(States::kConsumerThreads);
      }
      __syncthreads();
      if constexpr (!States::kIsFwd) launch_dependents();
      const int warpgroup = threadIdx.x / kWarpgroupThreads;
      if (warpgroup >= kWarpgroups) {
        if constexpr (States::kTradesRegisters) warpgroup_reg_dealloc<States::kProducerRegisters>();
        states.produce();
      } else {
        if constexpr (States::kTradesRegisters) warpgroup_reg_alloc<States::kConsumerRegisters>();
        if constexpr (!States::kIsSummary) grid_dependency_sync();
        states.consume(warpgroup);
      }
    };
    if constexpr (States::kIsFwd) {
      take_range(static_cast<int>(blockIdx.x));
      __syncthreads();
      const TileScheduler<typename States::Params> scheduler(p, work);
      if (scheduler.has_summary()) run(FwdSegment(scheduler.span()));
    } else {
      run(DirectedSegment(p, work));
    }
  }
}

// `States` is a StatePassing.
template <typename States>
cudaError_t launch_state_passing(int64_t blocks, int available, cudaStream_t stream, const typename States::Params& params,
                                 const typename States::Work& work, bool uses_pdl = false) {
  return launch_staged(state_passing_kernel<States>, blocks, States::kThreads, States::Shared::kMaxStages,
                       &States::Shared::bytes, available, stream, params, work, uses_pdl);
}

}  // namespace ssm_kernels::cuda::chunked
