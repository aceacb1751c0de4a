// SSD chunk-scan, backward: the states before each chunk, and the gradients of the states after each. See ssd_bwd.cuh.
//
// Every second block walks from the first chunk to the last and has S, the others from the last to the first and have T. Both
// are one recurrence: what a chunk has of its sequence's rows (S: x, T: the gradient g of y), weighed (c_j e^(s_l - s_j);
// e^s_i), times what it has of the group's (B; C), is added to the state, decayed by the whole chunk. Before that the state is
// rounded and goes to global memory, as the tile that ssd_bwd_chunks.cuh reads: to shared memory first, and from there as one
// copy that runs beside the products. The products take the weighed rows as two 16-bit numbers each, the rounded and what it
// leaves, so that a state is rounded nowhere else.
//
// Warps have the roles of ssd_fwd_wgmma.cuh: a warpgroup for each of the block's two units, and one that moves data.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/register_trade.cuh"
#include "ssd/ssd_fragments.cuh"
#include "ssd/ssd_supply.cuh"

namespace ssm_kernels::ssd {

// Of a sequence, the number of its first chunk among those of all.
__device__ __forceinline__ int64_t first_slot(const SsdParams& p, int64_t entry) {
  if (p.cu_seqlens != nullptr) return Span::sequence_start(p, entry) / kChunk + entry;
  return entry * ((p.seqlen + kChunk - 1) / kChunk);
}

template <int dstate>
struct StatesShared {
  static constexpr int kStages = 4;
  struct Stage {
    Tile<dstate> of_group;
    Tile<kUnitRows> of_unit[kUnits];
  };
  Stage stages[kStages];
  Tile<dstate> rounded[kUnits][2];
  ChunkTables tables[kStages][kUnits];
  cuda::SharedBarrier full[kStages], empty[kStages];
};

template <typename Scalar, int dstate>
struct BwdStates {
  // Of the warpgroup that moves data.
  static constexpr int kCopyingWarps = 2, kCopyingThreads = kCopyingWarps * kWarpSize;
  static_assert(kCopyingWarps + kUnits == kUnitWarps, "the others make tables, one for each unit");

  using Shared = StatesShared<dstate>;
  using Stage = typename Shared::Stage;
  static constexpr int kStages = Shared::kStages;

  const SsdBwdParams& p;
  const Partition& partition;
  Shared& shared;
  const Place at;
  bool is_reverse;

  // In the order of the walk.
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? at.chunks - 1 - position : position; }

  // The warpgroup after the units'.
  __device__ __forceinline__ void move() {
    const int thread = threadIdx.x % kUnitThreads, warp = thread / kWarpSize;
    const auto unit_at = [&](int index) { return Unit(p, partition, at, index); };
    RingPosition ring;
    if (warp >= kCopyingWarps) {
      const int index = warp - kCopyingWarps;
      supply_chunk_tables<Scalar, 2, false>(
          p, at, unit_at(index).head, Share<1>(), kStages, ring, shared.full, shared.empty,
          [&](int position) { return chunk_at(position); },
          [&](int stage) -> ChunkTables& { return shared.tables[stage][index]; });
      return;
    }
    const RowsView &of_group = is_reverse ? p.C : p.B, &of_unit = is_reverse ? p.grad_out : p.x;
    const int first = at.chunks > 0 ? chunk_at(0) : 0;
    RowCopier<dstate, kCopyingThreads> copy_of_group(at.template rows<Scalar>(of_group, at.group, first), of_group.stride_step,
                                                     p.dstate, thread);
    const auto copier_of_unit = [&](const Unit& unit) {
      return RowCopier<kUnitRows, kCopyingThreads>(at.template rows<Scalar>(of_unit, unit.head, first) + unit.first_row,
                                                   of_unit.stride_step, unit.rows, thread);
    };
    RowCopier<kUnitRows, kCopyingThreads> copy_of_units[kUnits] = {copier_of_unit(unit_at(0)), copier_of_unit(unit_at(1))};
    supply_copies<kStages - 2>(at.chunks, kStages, ring, shared.full, shared.empty, [&](int position, int stage) {
      Stage& target = shared.stages[stage];
      const int steps = at.steps_of(chunk_at(position));
      copy_of_group.copy(target.of_group, steps, of_group.stride_step, is_reverse);
#pragma unroll
      for (int index = 0; index < kUnits; ++index)
        copy_of_units[index].copy(target.of_unit[index], steps, of_unit.stride_step, is_reverse);
    });
  }

  // A unit's warpgroup.
  __device__ __forceinline__ void multiply(int index) {
    const Unit unit(p, partition, at, index);
    const Lane lane;
    const PairsOfTile pairs(lane);
    State<dstate> state;
    state.load(p, states_of(p, is_reverse ? p.grad_final_states : p.initial_states, at.entry), unit, lane);
    const int64_t slot_of_sequence = first_slot(p, at.entry);
    auto* const tiles = static_cast<Tile<dstate>*>(is_reverse ? p.grad_states : p.states) + unit.head * partition.row_blocks +
                        unit.first_row / kUnitRows;
    const bool starts_copies = threadIdx.x % kUnitThreads == 0 && unit.is_there;

    RingPosition ring;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      shared.full[ring.stage].wait(ring.phase);
      Stage& stage = shared.stages[ring.stage];
      const ChunkTables& tables = shared.tables[ring.stage][index];
      const float (&weights)[kChunk] = is_reverse ? tables.from_start : tables.to_end;

      Tile<dstate>& rounded = shared.rounded[index][position % 2];
      state.template round<Scalar>(rounded, pairs);
      uint32_t weighed[kStepGroups][4], rest[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        uint32_t x[4];
        cuda::load_matrices_transposed(x, stage.of_unit[index].columns_first(16 * j, 2 * lane.warp, lane.index));
        weigh_inputs<Scalar>(x, weights, j, lane, weighed[j], rest[j]);
      }
      state.decay(tables.whole);
      const uint64_t rows = describe(stage.of_group);
      cuda::fence_products();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::multiply<Scalar, true>(state.values, weighed[j], rows_of(rows, j), j > 0 || !has_begun(p, tables));
      }
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) cuda::multiply<Scalar, true>(state.values, rest[j], rows_of(rows, j), true);
      cuda::commit_products();

      // The tile of the chunk before has been read, so that the next may be written over it.
      cuda::wait_for_bulk_reads<0>();
      cuda::publish_to_products();
      cuda::barrier_sync(1 + index, kUnitThreads);
      const int64_t target = slot_of_sequence + chunk_at(position);
      cuda::bulk_store(tiles + target * p.units, &rounded, sizeof(rounded), starts_copies);
      cuda::wait_for_products<0>(state.values);
      shared.empty[ring.stage].arrive_as_warp();
      ring.advance(kStages);
    }
    if (is_reverse && p.grad_initial_states != nullptr) {
      state.store(p, states_of(p, p.grad_initial_states, at.entry), unit, lane);
    }
    cuda::wait_for_bulk_reads<0>();
  }
};

template <typename Scalar, int dstate>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? (kUnits + 1) * kUnitThreads : kWarpSize, 1)
    ssd_bwd_states_kernel(const __grid_constant__ SsdBwdParams p, const __grid_constant__ Partition partition) {
#if SSM_KERNELS_HAS_WGMMA
  using States = BwdStates<Scalar, dstate>;
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename States::Shared>(unaligned_memory);
  States states{p, partition, shared, Place(p, partition, blockIdx.x / 2), blockIdx.x % 2 != 0};
  if (threadIdx.x < States::kStages) {
    shared.full[threadIdx.x].init(States::kCopyingWarps + kUnits);
    shared.empty[threadIdx.x].init(kUnits * kUnitWarps);
  }
  __syncthreads();
  cuda::let_next_kernel_begin();
  const int warpgroup = threadIdx.x / kUnitThreads;
  if (warpgroup == kUnits) {
    cuda::leave_registers<88>();
    states.move();
  } else {
    cuda::take_registers<208>();
    states.multiply(warpgroup);
  }
#endif
}

}  // namespace ssm_kernels::ssd
