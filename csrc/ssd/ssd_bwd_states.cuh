// SSD chunk-scan, backward: the states before each chunk, and the gradients of the states after each. See ssd_bwd.cuh.
//
// One half of the blocks walk from the first chunk to the last and have S, the others from the last to the first and have T.
// Both are one recurrence: what a chunk has of its sequence's rows (S: x, T: the gradient g of y), weighed (c_j e^(s_l - s_j);
// e^s_i), times what it has of the group's (B; C), is added to the state, decayed by the whole chunk. Before that the state is
// rounded, where inputs are of 16 bits, and goes to global memory, as the tile that ssd_bwd_chunks.cuh reads: to shared memory
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
// Warps have the roles of ssd_fwd_wgmma.cuh: a warpgroup for each of the block's two units, and one that moves data. With the
// products of a warp (ssd_products.cuh) there are no such copies either: a unit rounds its state to where it had the chunk's
// rows, 64 columns after another, and its threads write them; in fp32 they write their registers, whose pairs fill sectors of
// memory. One warp copies then, not two, which leaves more registers to each thread; in fp32 two do, as four moving warps can
// hand registers on.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/register_trade.cuh"
#include "ssd/ssd_fragments.cuh"
#include "ssd/ssd_products.cuh"
#include "ssd/ssd_supply.cuh"

namespace ssm_kernels::ssd {

// Of a sequence, the number of its first chunk among those of all.
__device__ __forceinline__ int64_t first_slot(const SsdParams& p, int64_t entry) {
  if (is_packed(p)) return Span::sequence_start(p, entry) / kChunk + entry;
  return entry * ((p.seqlen + kChunk - 1) / kChunk);
}

template <typename Scalar, int dstate>
struct StatesStage {
  Tile<dstate, sizeof(Scalar)> of_group;
  Tile<kUnitRows, sizeof(Scalar)> of_unit[kUnits];
  TablesOf<Scalar> tables[kUnits];
};
template <int dstate>
struct RoundedStates {
  Tile<dstate> rounded[kUnits][2];  // of the chunk at work and the one before
};
template <typename Scalar, int dstate, typename Products>
using StatesShared = StagedShared<std::conditional_t<Products::kIsAsync, RoundedStates<dstate>, Nothing>,
                                  StatesStage<Scalar, dstate>, Products, 4>;

// A block's piece of a walk. The first blocks have the first pieces of all walks, forward and then back, the next ones the
// second pieces, and so on: neighbors, which run at the same time, read the same rows of the group. All pieces of a walk have
// equally many chunks, but the last ones may have fewer, or none.
struct DirectedPiece : Place {
  int index;  // in the order of the walk
  bool is_reverse;
  int first_chunk;  // in time, of the sequence's

  __device__ __forceinline__ DirectedPiece(const SsdBwdParams& p, const Partition& partition)
      : Place(p, partition, blockIdx.x % static_cast<unsigned>(partition.walks)),
        index(blockIdx.x / static_cast<unsigned>(partition.walks) / kDirections),
        is_reverse(blockIdx.x / static_cast<unsigned>(partition.walks) % kDirections != 0) {
    const int length = (chunks + p.pieces - 1) / p.pieces;
    const int begin = min(index * length, chunks), end = min(begin + length, chunks);
    first_chunk = is_reverse ? chunks - end : begin;
    narrow(first_chunk, end - begin);
  }

  // In the order of the walk.
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? chunks - 1 - position : position; }
};

template <typename Scalar, int dstate, bool states_only, typename Products>
struct BwdStates {
  // Of the warps that move data. Four can hand registers on, where the device lets them.
  static constexpr bool kTradesRegisters = Products::kIsAsync || kIsFp32<Scalar>;
  static constexpr int kCopyingWarps = kTradesRegisters ? 2 : 1, kCopyingThreads = kCopyingWarps * kWarpSize;
  static constexpr int kMovingWarps = kCopyingWarps + kUnits;  // the others make tables, one for each unit
  static constexpr int kThreads = kUnits * kUnitThreads + kMovingWarps * kWarpSize;
  // Of a thread, where they are traded.
  static constexpr int kUnitRegisters = 208,
                       kMoverRegisters =
                           cuda::registers_left<kUnits * kUnitThreads, kUnitRegisters, kMovingWarps * kWarpSize>();

  using Shared = StatesShared<Scalar, dstate, Products>;
  using Stage = typename Shared::Stage;
  using Image = Tile<dstate, sizeof(Scalar)>;
  using HeadTile = Tile<kUnitRows, sizeof(Scalar)>;
  using PairsOfTile = ssd::PairsOfTile<sizeof(Scalar)>;

  const SsdBwdParams& p;
  const Partition& partition;
  Shared& shared;
  const DirectedPiece at;

  __device__ __forceinline__ int stages() const { return Shared::stages(p); }

  // The warpgroup after the units'.
  __device__ __forceinline__ void move() {
    const int thread = threadIdx.x % kUnitThreads, warp = thread / kWarpSize;
    const auto unit_at = [&](int index) { return Unit(p, partition, at, index); };
    RingPosition ring;
    if (warp >= kCopyingWarps) {
      const int index = warp - kCopyingWarps;
      supply_chunk_tables<Scalar, 2, false>(
          p, at, unit_at(index).head, Share<1>(), stages(), ring, shared.full, shared.empty,
          [&](int position) { return at.chunk_at(position); },
          [&](int stage) -> TablesOf<Scalar>& { return shared.stage(stage).tables[index]; });
      return;
    }
    const RowsView &of_group = at.is_reverse ? p.C : p.B, &of_unit = at.is_reverse ? p.grad_out : p.x;
    const int first = at.chunks > 0 ? at.chunk_at(0) : 0;
    RowCopier<Scalar, dstate, kCopyingThreads> copy_of_group(at.template rows<Scalar>(of_group, at.group, first),
                                                             of_group.stride_step, p.dstate, thread);
    using CopierOfUnit = RowCopier<Scalar, kUnitRows, kCopyingThreads>;
    const auto copier_of_unit = [&](const Unit& unit) {
      return CopierOfUnit(at.template rows<Scalar>(of_unit, unit.head, first) + unit.first_row, of_unit.stride_step, unit.rows,
                          thread);
    };
    CopierOfUnit copy_of_units[kUnits] = {copier_of_unit(unit_at(0)), copier_of_unit(unit_at(1))};
    constexpr int kPending = Shared::kMaxStages - 2;
    supply_copies<kPending>(at.chunks, stages(), ring, shared.full, shared.empty, [&](int position, int stage) {
      Stage& target = shared.stage(stage);
      const Rows rows = rows_of_chunk(at.chunk_at(position));
      copy_of_group.copy(target.of_group, rows.end, of_group.stride_step, at.is_reverse, rows.first);
#pragma unroll
      for (int index = 0; index < kUnits; ++index)
        copy_of_units[index].copy(target.of_unit[index], rows.end, of_unit.stride_step, at.is_reverse, rows.first);
    });
  }

  // A unit's warpgroup.
  __device__ __forceinline__ void multiply(int index) {
    const Unit unit(p, partition, at, index);
    const Lane lane;
    const PairsOfTile pairs(lane);
    State<dstate> state;
    if constexpr (states_only) {
      state.clear();
    } else {
      begin(state, unit, index, lane);
    }
    float decay_of_piece = 1;
    const int64_t first_target = first_slot(p, at.entry) + at.first_chunk;
    auto* const tiles = static_cast<Image*>(at.is_reverse ? p.grad_states : p.states) + unit.head * partition.row_blocks +
                        unit.first_row / kUnitRows;
    const auto target_of = [&](int position) { return tiles + (first_target + at.chunk_at(position)) * p.units; };
    const bool starts_copies = threadIdx.x % kUnitThreads == 0 && unit.is_there();

    RingPosition ring;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      shared.full[ring.stage].wait(ring.phase);
      Stage& stage = shared.stage(ring.stage);
      const auto& tables = stage.tables[index];
      const float (&weights)[kChunk] = at.is_reverse ? tables.from_start : tables.to_end;
      if constexpr (kIsFp32<Scalar>) {
        if (tables.begins_anew && !at.is_reverse) state.clear();
      }

      if constexpr (Products::kIsAsync && !states_only) {
        state.template round<Scalar>(shared.rounded[index][position % 2], pairs);
      }
      const auto rows = Products::describe(stage.of_group, lane);
      if constexpr (states_only) add_decay(p, decay_of_piece, tables);
      if constexpr (kIsFp32<Scalar>) {
        if (!states_only && unit.is_there()) state.template round<Scalar>(*target_of(position), pairs);
        if (has_begun(p, tables)) {
          state.clear();
        } else {
          state.decay(tables.whole);
        }
        // One group of steps at a time: ptxas orders the products of all so that each waits for the one before.
#pragma unroll 1
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::OperandA<Scalar> x, weighed;
          load_inputs(x, stage.of_unit[index], j, lane);
          weigh_inputs<Scalar>(x, weights, j, lane, weighed);
          cuda::multiply<Scalar, true>(state.values, weighed, rows_of(rows, j), true);
        }
      } else {
        cuda::OperandA<Scalar> x[kStepGroups], weighed[kStepGroups], rest[kStepGroups];
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          load_inputs(x[j], stage.of_unit[index], j, lane);
          if constexpr (Products::kIsAsync) weigh_inputs<Scalar>(x[j], weights, j, lane, weighed[j], rest[j]);
        }
        if constexpr (!Products::kIsAsync && !states_only) {
          if (unit.is_there()) write_in_parts(state, stage.of_unit[index], pairs, index, *target_of(position));
        }
        state.decay(tables.whole);
        Products::fence();
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          if constexpr (!Products::kIsAsync) weigh_inputs<Scalar>(x[j], weights, j, lane, weighed[j], rest[j]);
          cuda::multiply<Scalar, true>(state.values, weighed[j], rows_of(rows, j), j > 0 || !has_begun(p, tables));
          if constexpr (!Products::kIsAsync) cuda::multiply<Scalar, true>(state.values, rest[j], rows_of(rows, j), true);
        }
        if constexpr (Products::kIsAsync) {
#pragma unroll
          for (int j = 0; j < kStepGroups; ++j) cuda::multiply<Scalar, true>(state.values, rest[j], rows_of(rows, j), true);
        }
      }
      Products::commit();

      if constexpr (Products::kIsAsync && !states_only) {
        // The tile of the chunk before has been read, so that the next may be written over it.
        cuda::wait_for_bulk_reads<0>();
        Products::publish();
        cuda::barrier_sync(1 + index, kUnitThreads);
        const Image& rounded = shared.rounded[index][position % 2];
        cuda::bulk_store(target_of(position), &rounded, sizeof(rounded), starts_copies);
      }
      Products::template wait<0>(state.values);
      shared.empty[ring.stage].arrive();
      ring.advance(stages());
    }
    if constexpr (states_only) {
      effects().leave(state, decay_of_piece, place_of(blockIdx.x, index));
    } else {
      const bool is_last = at.index + 1 == p.pieces;
      if (at.is_reverse && is_last && p.grad_initial_states != nullptr) {
        state.store(p, states_of(p, p.grad_initial_states, at.entry), unit, lane);
      }
      if constexpr (Products::kIsAsync) cuda::wait_for_bulk_reads<0>();
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
      begins[i] = __ballot_sync(kWholeWarp, step < steps && resets[step] != 0);
    }
    if ((begins[0] | begins[1]) == 0) return {0, steps};
    if (at.is_reverse) return {0, begins[0] != 0 ? __ffs(begins[0]) - 1 : kWarpSize + __ffs(begins[1]) - 1};
    return {begins[1] != 0 ? kChunk - 1 - __clz(begins[1]) : kWarpSize - 1 - __clz(begins[0]), steps};
  }

  // The rounded state, by the threads of the unit, through the tile of its chunk's rows, which all of them have read then.
  __device__ __forceinline__ void write_in_parts(const State<dstate>& state, HeadTile& tile, const PairsOfTile& pairs,
                                                 int index, Image& target) const {
    constexpr int kPieces = sizeof(HeadTile) / sizeof(uint4);
    static_assert(sizeof(HeadTile) % Image::kPartBytes == 0, "parts of the state's columns take the place of the rows");
    const int thread = threadIdx.x % kUnitThreads;
#pragma unroll
    for (int part = 0; part < dstate / kUnitRows; ++part) {
      cuda::barrier_sync(1 + index, kUnitThreads);
      state.template round<Scalar>(tile, pairs, part);
      cuda::barrier_sync(1 + index, kUnitThreads);
      const auto* const source = reinterpret_cast<const uint4*>(&tile) + thread;
      auto* const pieces = reinterpret_cast<uint4*>(&target) + part * kPieces + thread;
#pragma unroll
      for (int i = 0; i < kPieces; i += kUnitThreads) __stcg(pieces + i, source[i]);
    }
  }

  // The state with which the piece begins.
  __device__ __forceinline__ void begin(State<dstate>& state, const Unit& unit, int index, const Lane& lane) const {
    state.load(p, states_of(p, at.is_reverse ? p.grad_final_states : p.initial_states, at.entry), unit, lane);
    const int blocks = static_cast<int>(partition.walks) * kDirections;  // from one piece of a walk to the next
    const int block = static_cast<int>(blockIdx.x);
    effects().fold_into(state, place_of(block - at.index * blocks, index), place_of(block, index), place_of(blocks, 0));
  }

  __device__ __forceinline__ PieceEffects<dstate> effects() const { return {p.piece_states, p.piece_decays}; }
  // Where it lies what a block's piece does to the state of a unit.
  static __device__ __forceinline__ int place_of(int block, int index) { return block * kUnits + index; }
};

template <typename Scalar, int dstate, bool states_only, typename Products>
__global__ void __launch_bounds__(Products::kAreCompiled ? BwdStates<Scalar, dstate, states_only, Products>::kThreads
                                                         : kWarpSize,
                                  1)
    ssd_bwd_states_kernel(const __grid_constant__ SsdBwdParams p, const __grid_constant__ Partition partition) {
  if constexpr (Products::kAreCompiled) {
    using States = BwdStates<Scalar, dstate, states_only, Products>;
    extern __shared__ unsigned char unaligned_memory[];
    auto& shared = States::Shared::at(unaligned_memory);
    States states{p, partition, shared, DirectedPiece(p, partition)};
    if (threadIdx.x < states.stages()) {
      shared.full[threadIdx.x].init(States::kCopyingThreads + kUnits * kWarpSize);
      shared.empty[threadIdx.x].init(kUnits * kUnitThreads);
    }
    __syncthreads();
    cuda::let_next_kernel_begin();
    const int warpgroup = threadIdx.x / kUnitThreads;
    if (warpgroup == kUnits) {
      if constexpr (States::kTradesRegisters) cuda::leave_registers<States::kMoverRegisters>();
      states.move();
    } else {
      if constexpr (States::kTradesRegisters) cuda::take_registers<States::kUnitRegisters>();
      if constexpr (!states_only) cuda::wait_for_kernel_before();
      states.multiply(warpgroup);
    }
  }
}

}  // namespace ssm_kernels::ssd
