// SSD chunk-scan, backward: the states before each chunk, and the gradients of the states after each. See bwd.cuh.
//
// One half of the blocks walk from the first chunk to the last and have S, the others from the last to the first and have T.
// Both are one recurrence: what a chunk has of its sequence's rows (S: x, T: the gradient g of y), weighed (c_j e^(s_l - s_j);
// e^s_i), times what it has of the group's (B; C), is added to the state, decayed by the whole chunk. Before that the state is
// rounded, where inputs are of 16 bits, and goes to global memory, as the tile that bwd_chunks.cuh reads: to shared memory
// first, and from there as one copy that runs beside the products. In 16 bits the products take the weighed rows as two numbers
// each, the rounded and what it leaves, so that a state is rounded nowhere else.
//
// Where walks are fewer than the device has room for (few heads, long sequences), each is cut into pieces of equally many
// chunks, one for a block, and there are two launches. The first only finds states: what each piece but a walk's last does to
// one (the state after it, begun with zero, and its decay). In the second each piece begins with the state that the walk begins
// with, into which the pieces before it are folded, in order; it takes the place of the one launch of walks that are not cut.
//
// What a piece has done to a state is the same kind of thing in both directions. Where a sequence begins in a chunk, nothing
// goes through it either way: the decay of the whole chunk is zero, and what the chunk adds to T is only of the steps before
// the beginning, as what it adds to S is only of those after.
//
// Warps have the roles of fwd_sm90.cuh: a warpgroup for each of the block's two units, and one that moves data. With the
// products of a warp (mma_policy.cuh) there are no such copies either: a unit rounds its state to where it had the chunk's
// rows, 64 columns after another, and its threads write them; in fp32 they write their registers, whose pairs fill sectors of
// memory. One warp copies then, not two, which leaves more registers to each thread; in fp32 two do, as four moving warps can
// hand registers on.
#pragma once

#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"
#include "ssd/cuda/state.cuh"

namespace ssm_kernels::ssd {

// Of a sequence, the number of its first chunk among those of all.
__device__ __forceinline__ int64_t first_chunk_index(const SsdParams& p, int64_t entry) {
  if (is_packed(p)) return ChunkSpan::sequence_start(p, entry) / kChunk + entry;
  return entry * ((p.seqlen + kChunk - 1) / kChunk);
}

template <typename Scalar, int dstate>
struct StatesStage {
  SmemTile<dstate, sizeof(Scalar)> group_rows;
  SmemTile<kStateRows, sizeof(Scalar)> head_rows[kWarpgroups];
  TablesOf<Scalar> tables[kWarpgroups];
};
template <int dstate>
struct RoundedStates {
  SmemTile<dstate> rounded[kWarpgroups][2];  // of the chunk at work and the one before
};
template <typename Scalar, int dstate, typename Mma>
using StatesShared =
    StagedShared<std::conditional_t<Mma::kIsAsync, RoundedStates<dstate>, Empty>, StatesStage<Scalar, dstate>, Mma, 4>;

// A block's piece of a walk. The first blocks have the first pieces of all walks, forward and then back, the next ones the
// second pieces, and so on: neighbors, which run at the same time, read the same rows of the group. All pieces of a walk have
// equally many chunks, but the last ones may have fewer, or none.
struct DirectedSegment : WorkSpan {
  int index;  // in the order of the walk
  bool is_reverse;
  int first_chunk;  // in time, of the sequence's

  __device__ __forceinline__ DirectedSegment(const SsdBwdParams& p, const WorkPartition& partition)
      : WorkSpan(p, partition, blockIdx.x % static_cast<unsigned>(partition.work_tiles)),
        index(blockIdx.x / static_cast<unsigned>(partition.work_tiles) / kDirections),
        is_reverse(blockIdx.x / static_cast<unsigned>(partition.work_tiles) % kDirections != 0) {
    const int length = (chunks + p.segments - 1) / p.segments;
    const int begin = min(index * length, chunks), end = min(begin + length, chunks);
    first_chunk = is_reverse ? chunks - end : begin;
    narrow(first_chunk, end - begin);
  }

  // In the order of the walk.
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? chunks - 1 - position : position; }
};

template <typename Scalar, int dstate, bool states_only, typename Mma>
struct BwdStates {
  // Of the warps that move data. Four can hand registers on, where the device lets them.
  static constexpr bool kTradesRegisters = Mma::kIsAsync || kIsFp32<Scalar>;
  static constexpr int kCopyWarps = kTradesRegisters ? 2 : 1, kCopyThreads = kCopyWarps * kWarpSize;
  static constexpr int kProducerWarps = kCopyWarps + kWarpgroups;  // the others make tables, one for each unit
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads + kProducerWarps * kWarpSize;
  // Of a thread, where they are traded.
  static constexpr int
      kConsumerRegisters = 208,
      kProducerRegisters =
          cuda::producer_registers<kWarpgroups * kWarpgroupThreads, kConsumerRegisters, kProducerWarps * kWarpSize>();

  using Shared = StatesShared<Scalar, dstate, Mma>;
  using Stage = typename Shared::Stage;
  using SwizzledState = SmemTile<dstate, sizeof(Scalar)>;
  using HeadTile = SmemTile<kStateRows, sizeof(Scalar)>;
  using FragmentPairs = cuda::FragmentPairs<sizeof(Scalar)>;

  const SsdBwdParams& p;
  const WorkPartition& partition;
  Shared& shared;
  const DirectedSegment at;

  __device__ __forceinline__ int stages() const { return Shared::stages(p.stages); }

  // The warpgroup after the units'.
  __device__ __forceinline__ void produce() {
    const int thread = threadIdx.x % kWarpgroupThreads, warp = thread / kWarpSize;
    const auto state_tile_at = [&](int index) { return StateTile(p, partition, at, index); };
    PipelineState pipeline;
    if (warp >= kCopyWarps) {
      const int index = warp - kCopyWarps;
      produce_chunk_cumsum<Scalar, 2, false>(
          p, at, state_tile_at(index).head, WarpShare<1>(), stages(), pipeline, shared.full, shared.empty,
          [&](int position) { return at.chunk_at(position); },
          [&](int stage) -> TablesOf<Scalar>& { return shared.stage(stage).tables[index]; });
      return;
    }
    const RowsView &group_rows = at.is_reverse ? p.C : p.B, &head_rows = at.is_reverse ? p.grad_out : p.x;
    const int first = at.chunks > 0 ? at.chunk_at(0) : 0;
    RowCopier<Scalar, dstate, kCopyThreads> copy_group_rows(at.template rows<Scalar>(group_rows, at.group, first),
                                                            group_rows.stride_step, p.dstate, thread);
    using TileCopier = RowCopier<Scalar, kStateRows, kCopyThreads>;
    const auto tile_copier = [&](const StateTile& state_tile) {
      return TileCopier(at.template rows<Scalar>(head_rows, state_tile.head, first) + state_tile.first_row,
                        head_rows.stride_step, state_tile.rows, thread);
    };
    TileCopier copy_tiles[kWarpgroups] = {tile_copier(state_tile_at(0)), tile_copier(state_tile_at(1))};
    constexpr int kPending = Shared::kMaxStages - 2;
    cuda::produce_copies<kPending>(at.chunks, stages(), pipeline, shared.full, shared.empty, [&](int position, int stage) {
      Stage& target = shared.stage(stage);
      const Rows rows = rows_of_chunk(at.chunk_at(position));
      copy_group_rows.copy(target.group_rows, rows.end, group_rows.stride_step, at.is_reverse, rows.first);
#pragma unroll
      for (int index = 0; index < kWarpgroups; ++index)
        copy_tiles[index].copy(target.head_rows[index], rows.end, head_rows.stride_step, at.is_reverse, rows.first);
    });
  }

  // A unit's warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const StateTile state_tile(p, partition, at, index);
    const FragmentLane lane;
    const FragmentPairs pairs(lane);
    State<dstate> state;
    if constexpr (states_only) {
      state.clear();
    } else {
      begin(state, state_tile, index, lane);
    }
    float segment_decay = 1;
    const int64_t first_target = first_chunk_index(p, at.entry) + at.first_chunk;
    auto* const tiles = static_cast<SwizzledState*>(at.is_reverse ? p.grad_states : p.states) +
                        state_tile.head * partition.row_blocks + state_tile.first_row / kStateRows;
    const auto target_of = [&](int position) { return tiles + (first_target + at.chunk_at(position)) * p.state_tiles; };
    const bool starts_copies = threadIdx.x % kWarpgroupThreads == 0 && state_tile.is_there();

    PipelineState pipeline;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      shared.full[pipeline.stage].wait(pipeline.phase);
      Stage& stage = shared.stage(pipeline.stage);
      const auto& tables = stage.tables[index];
      const float (&weights)[kChunk] = at.is_reverse ? tables.exp_cumsum : tables.gain_to_chunk_end;
      if constexpr (kIsFp32<Scalar>) {
        if (tables.starts_with_reset && !at.is_reverse) state.clear();
      }

      if constexpr (Mma::kIsAsync && !states_only) {
        state.template round<Scalar>(shared.rounded[index][position % 2], pairs);
      }
      const auto rows = Mma::describe(stage.group_rows, lane);
      if constexpr (states_only) add_decay(p, segment_decay, tables);
      if constexpr (kIsFp32<Scalar>) {
        if (!states_only && state_tile.is_there()) state.template round<Scalar>(*target_of(position), pairs);
        if (has_reset(p, tables)) {
          state.clear();
        } else {
          state.decay(tables.chunk_decay);
        }
        // One group of steps at a time: ptxas orders the products of all so that each waits for the one before.
#pragma unroll 1
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::OperandA<Scalar> x, scaled;
          load_inputs(x, stage.head_rows[index], j, lane);
          scale_inputs<Scalar>(x, weights, j, lane, scaled);
          cuda::gemm<Scalar, true>(state.values, scaled, rows_of(rows, j), true);
        }
      } else {
        cuda::OperandA<Scalar> x[kStepGroups], scaled[kStepGroups], lo[kStepGroups];
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          load_inputs(x[j], stage.head_rows[index], j, lane);
          if constexpr (Mma::kIsAsync) scale_inputs<Scalar>(x[j], weights, j, lane, scaled[j], lo[j]);
        }
        if constexpr (!Mma::kIsAsync && !states_only) {
          if (state_tile.is_there()) write_panels(state, stage.head_rows[index], pairs, index, *target_of(position));
        }
        state.decay(tables.chunk_decay);
        Mma::fence();
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          if constexpr (!Mma::kIsAsync) scale_inputs<Scalar>(x[j], weights, j, lane, scaled[j], lo[j]);
          cuda::gemm<Scalar, true>(state.values, scaled[j], rows_of(rows, j), j > 0 || !has_reset(p, tables));
          if constexpr (!Mma::kIsAsync) cuda::gemm<Scalar, true>(state.values, lo[j], rows_of(rows, j), true);
        }
        if constexpr (Mma::kIsAsync) {
#pragma unroll
          for (int j = 0; j < kStepGroups; ++j) cuda::gemm<Scalar, true>(state.values, lo[j], rows_of(rows, j), true);
        }
      }
      Mma::commit();

      if constexpr (Mma::kIsAsync && !states_only) {
        // The tile of the chunk before has been read, so that the next may be written over it.
        cuda::tma_store_wait_read<0>();
        Mma::publish();
        cuda::barrier_sync(1 + index, kWarpgroupThreads);
        const SwizzledState& rounded = shared.rounded[index][position % 2];
        cuda::tma_store(target_of(position), &rounded, sizeof(rounded), starts_copies);
      }
      Mma::template wait<0>(state.values);
      shared.empty[pipeline.stage].arrive();
      pipeline.advance(stages());
    }
    if constexpr (states_only) {
      summaries().store(state, segment_decay, place_of(blockIdx.x, index));
    } else {
      const bool is_last = at.index + 1 == p.segments;
      if (at.is_reverse && is_last && p.grad_initial_states != nullptr) {
        state.store(p, states_of(p, p.grad_initial_states, at.entry), state_tile, lane);
      }
      if constexpr (Mma::kIsAsync) cuda::tma_store_wait_read<0>();
    }
  }

 private:
  // What a chunk adds to a state. In fp32 no row past a beginning of a sequence is multiplied, which a NaN would go through.
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

  // The rounded state, by the threads of the unit, through the tile of its chunk's rows, which all of them have read then.
  __device__ __forceinline__ void write_panels(const State<dstate>& state, HeadTile& tile, const FragmentPairs& pairs,
                                               int index, SwizzledState& target) const {
    constexpr int kVectors = sizeof(HeadTile) / sizeof(uint4);
    static_assert(sizeof(HeadTile) % SwizzledState::kPanelBytes == 0,
                  "parts of the state's columns take the place of the rows");
    const int thread = threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int panel = 0; panel < dstate / kStateRows; ++panel) {
      cuda::barrier_sync(1 + index, kWarpgroupThreads);
      state.template round<Scalar>(tile, pairs, panel);
      cuda::barrier_sync(1 + index, kWarpgroupThreads);
      const auto* const source = reinterpret_cast<const uint4*>(&tile) + thread;
      auto* const vectors = reinterpret_cast<uint4*>(&target) + panel * kVectors + thread;
#pragma unroll
      for (int i = 0; i < kVectors; i += kWarpgroupThreads) __stcg(vectors + i, source[i]);
    }
  }

  // The state with which the piece begins.
  __device__ __forceinline__ void begin(State<dstate>& state, const StateTile& state_tile, int index,
                                        const FragmentLane& lane) const {
    state.load(p, states_of(p, at.is_reverse ? p.grad_final_states : p.initial_states, at.entry), state_tile, lane);
    const int blocks = static_cast<int>(partition.work_tiles) * kDirections;  // from one piece of a walk to the next
    const int block = static_cast<int>(blockIdx.x);
    summaries().fold_into(state, place_of(block - at.index * blocks, index), place_of(block, index), place_of(blocks, 0));
  }

  __device__ __forceinline__ SegmentSummaries<dstate> summaries() const { return {p.segment_states, p.segment_decays}; }
  // Where it lies what a block's piece does to the state of a unit.
  static __device__ __forceinline__ int place_of(int block, int index) { return block * kWarpgroups + index; }
};

template <typename Scalar, int dstate, bool states_only, typename Mma>
__global__ void __launch_bounds__(Mma::kAreCompiled ? BwdStates<Scalar, dstate, states_only, Mma>::kThreads : kWarpSize, 1)
    ssd_bwd_states_kernel(const __grid_constant__ SsdBwdParams p, const __grid_constant__ WorkPartition partition) {
  if constexpr (Mma::kAreCompiled) {
    using States = BwdStates<Scalar, dstate, states_only, Mma>;
    extern __shared__ unsigned char unaligned_memory[];
    auto& shared = States::Shared::at(unaligned_memory);
    States states{p, partition, shared, DirectedSegment(p, partition)};
    if (threadIdx.x < states.stages()) {
      shared.full[threadIdx.x].init(States::kCopyThreads + kWarpgroups * kWarpSize);
      shared.empty[threadIdx.x].init(kWarpgroups * kWarpgroupThreads);
    }
    __syncthreads();
    cuda::launch_dependents();
    const int warpgroup = threadIdx.x / kWarpgroupThreads;
    if (warpgroup == kWarpgroups) {
      if constexpr (States::kTradesRegisters) cuda::warpgroup_reg_dealloc<States::kProducerRegisters>();
      states.produce();
    } else {
      if constexpr (States::kTradesRegisters) cuda::warpgroup_reg_alloc<States::kConsumerRegisters>();
      if constexpr (!states_only) cuda::grid_dependency_sync();
      states.consume(warpgroup);
    }
  }
}

}  // namespace ssm_kernels::ssd
