// SSD chunk-scan, forward, with the products of compute capability 9.0a (cuda/wgmma.cuh). See ssd_fwd.cuh for what is
// computed.
//
// A block has a warpgroup for each of its two units, and one more that moves data: two of its warps copy the chunks ahead to
// shared memory, and one makes the tables of their decays for each unit (ssd_supply.cuh). A unit's products overlap with its
// other work: while S C^T runs, M^T is weighed; while S is updated, out is written.
//
// All products of a chunk read registers that were made before the first of them begins: the compiler waits for products under
// way where it cannot tell that registers are none of theirs, and before branches.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/register_trade.cuh"
#include "ssd/ssd_fragments.cuh"
#include "ssd/ssd_supply.cuh"

namespace ssm_kernels::ssd {

template <int dstate>
struct WgmmaShared {
  struct Stage {
    Tile<dstate> C, B;
    Tile<kUnitRows> x[kUnits];
  };
  Tile<kChunk> products[kUnits];  // M^T
  Tile<kUnitRows> out[kUnits];
  ChunkTables tables[kMaxStages][kUnits];
  cuda::SharedBarrier full[kMaxStages], empty[kMaxStages];

  static SSM_HOST_DEVICE constexpr int align(int bytes) {
    return (bytes + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment;
  }
  static SSM_HOST_DEVICE constexpr int stage_bytes(bool has_gate) {
    return static_cast<int>(sizeof(Stage) + (has_gate ? kUnits * sizeof(Tile<kUnitRows>) : 0));
  }
  static SSM_HOST_DEVICE constexpr int bytes(int stages, bool has_gate) {
    return kOperandAlignment + align(static_cast<int>(sizeof(WgmmaShared))) + stages * stage_bytes(has_gate);
  }
};

template <typename Scalar, int dstate, bool states_only>
struct WgmmaFwd {
  // Of the warpgroup that moves data.
  static constexpr int kCopyingWarps = 2, kCopyingThreads = kCopyingWarps * kWarpSize;
  static_assert(kCopyingWarps + kUnits == kUnitWarps, "the others make tables, one for each unit");

  using Shared = WgmmaShared<dstate>;
  using Stage = typename Shared::Stage;
  static constexpr int kStateGroups = dstate / 16;

  const SsdFwdParams& p;
  const Partition& partition;
  Shared& shared;
  unsigned char* stages;
  bool has_gate;

  __device__ __forceinline__ WgmmaFwd(const SsdFwdParams& p, const Partition& partition, unsigned char* memory)
      : p(p),
        partition(partition),
        shared(*reinterpret_cast<Shared*>(memory)),
        stages(memory + Shared::align(sizeof(Shared))),
        has_gate(!states_only && p.z.data != nullptr) {}

  __device__ __forceinline__ Stage& stage(int slot) const {
    return *reinterpret_cast<Stage*>(stages + slot * Shared::stage_bytes(has_gate));
  }
  __device__ __forceinline__ Tile<kUnitRows>* z_tile(int slot, int unit) const {
    return reinterpret_cast<Tile<kUnitRows>*>(&stage(slot) + 1) + unit;
  }

  // The warpgroup after the units'.
  __device__ __forceinline__ void move(const Place& at) {
    const int thread = threadIdx.x % kUnitThreads, warp = thread / kWarpSize;
    const auto unit_at = [&](int index) { return Unit(p, partition.row_blocks, at, index); };
    if (warp >= kCopyingWarps) {
      const int index = warp - kCopyingWarps;
      const HeadSteps head(p, unit_at(index).head);
      const Scalar* const dt = at.template rows<const Scalar>(p.dt, unit_at(index).head, 0);
      supply_tables<FetchedSteps<Scalar>>(
          at.chunks, partition.stages, shared.full, shared.empty,
          [&](int chunk, auto& fetched) {
            fetched.fetch(p, dt + chunk * kChunk * p.dt.stride_step, at.resets(p, chunk), at.steps_of(chunk));
          },
          [&](int, int stage, const auto& fetched) { make_tables(p, head, fetched, shared.tables[stage][index]); });
      return;
    }
    using StateRows = RowCopier<dstate, kCopyingThreads>;
    using HeadRows = RowCopier<kUnitRows, kCopyingThreads>;
    const auto of_group = [&](const RowsView& view) {
      return StateRows(at.template rows<Scalar>(view, at.group, 0), view.stride_step, p.dstate, thread);
    };
    const auto of_unit = [&](const RowsView& view, const Unit& unit) {
      return HeadRows(at.template rows<Scalar>(view, unit.head, 0) + unit.first_row, view.stride_step, unit.rows, thread);
    };
    const RowsView& z = has_gate ? p.z : p.x;
    StateRows copy_B = of_group(p.B), copy_C = of_group(p.C);
    HeadRows copy_x[kUnits] = {of_unit(p.x, unit_at(0)), of_unit(p.x, unit_at(1))};
    HeadRows copy_z[kUnits] = {of_unit(z, unit_at(0)), of_unit(z, unit_at(1))};
    supply_copies(at.chunks, partition.stages, shared.full, shared.empty, [&](int chunk, int slot) {
      Stage& target = stage(slot);
      const int steps = at.steps_of(chunk);
      copy_B.copy(target.B, steps, p.B.stride_step);
      if constexpr (!states_only) copy_C.copy(target.C, steps, p.C.stride_step);
#pragma unroll
      for (int index = 0; index < kUnits; ++index) {
        copy_x[index].copy(target.x[index], steps, p.x.stride_step);
        if (has_gate) copy_z[index].copy(*z_tile(slot, index), steps, p.z.stride_step);
      }
    });
  }

  // A unit's warpgroup.
  __device__ __forceinline__ void multiply(const Place& at, int index) {
    const Unit unit(p, partition.row_blocks, at, index);
    const Lane lane;
    State<dstate> state;
    if constexpr (states_only) {
      state.clear();
    } else {
      state.begin(p, partition, at, unit, lane);
    }
    OutWriter<Scalar> out(p, at, unit, lane);
    float decay_of_segment = 1;
    Tile<kChunk>& products = shared.products[index];
    if constexpr (!states_only) clear_left_of_diagonal(products, lane);
    const PairsOfTile pairs(lane);
    const PairMask pair_mask(lane);

    RingPosition ring;
#pragma unroll 1
    for (int chunk = 0; chunk < at.chunks; ++chunk) {
      shared.full[ring.stage].wait(ring.phase);
      Stage& tiles = stage(ring.stage);
      const ChunkTables& tables = shared.tables[ring.stage][index];
      const uint64_t B_rows = describe(tiles.B), C_rows = describe(tiles.C);

      const uint32_t mask = pair_mask.of(tables, lane);
      float y[kStepBlocks][4];
      if constexpr (!states_only) {
        float m[kStepBlocks][4];
        uint32_t s[kStateGroups][4];
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
        cuda::fence_products();
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) {
          cuda::multiply<Scalar, false, false>(m, columns_of(B_rows, k), columns_of(C_rows, k), k > 0);
        }
        cuda::commit_products();
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) cuda::multiply<Scalar, false>(y, s[k], columns_of(C_rows, k), k > 0);
        cuda::commit_products();
        cuda::wait_for_products<1>(m);
        // All warps have done with the M^T of the chunk before.
        cuda::barrier_sync(1 + index, kUnitThreads);
        weigh_products<Scalar>(m, tables, mask, pairs, lane, products);
        cuda::publish_to_products();
      }

      uint32_t x[kStepGroups][4], weighed[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::load_matrices_transposed(x[j], tiles.x[index].columns_first(16 * j, 2 * lane.warp, lane.index));
        weigh_inputs<Scalar>(x[j], tables.to_end, j, lane, weighed[j]);
      }

      if constexpr (!states_only) {
        cuda::wait_for_products<0>(y);
        decay_from_start(y, tables, lane);
        cuda::barrier_sync(1 + index, kUnitThreads);
        const uint64_t x_rows = describe(tiles.x[index]);
        cuda::fence_products();
        const uint64_t m_rows = describe(products);
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::multiply<Scalar, true, true>(y, rows_of(x_rows, j), rows_of(m_rows, j), true);
        }
        cuda::commit_products();
      } else {
        add_decay(decay_of_segment, tables);
      }

      state.decay(tables.whole);
      cuda::fence_products();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::multiply<Scalar, true>(state.values, weighed[j], rows_of(B_rows, j), j > 0 || !tables.has_begun);
      }
      cuda::commit_products();

      if constexpr (!states_only) {
        cuda::wait_for_products<1>(y);
        out.write(y, x, has_gate ? z_tile(ring.stage, index) : nullptr, shared.out[index], lane, at.steps_of(chunk));
      }
      cuda::wait_for_products<0>(state.values);
      shared.empty[ring.stage].arrive();
      ring.advance(partition.stages);
    }
    if (states_only || at.is_last_segment(partition)) {
      state.end(p, partition, at, unit, lane, !states_only, decay_of_segment);
    }
  }
};

template <typename Scalar, int dstate, bool states_only>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? (kUnits + 1) * kUnitThreads : kWarpSize, 1)
    ssd_fwd_wgmma_kernel(const __grid_constant__ SsdFwdParams p, const __grid_constant__ Partition partition) {
#if SSM_KERNELS_HAS_WGMMA
  using Fwd = WgmmaFwd<Scalar, dstate, states_only>;
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename Fwd::Shared>(unaligned_memory);
  Fwd fwd(p, partition, reinterpret_cast<unsigned char*>(&shared));

  const int warpgroup = threadIdx.x / kUnitThreads;
  const Place at(p, partition, blockIdx.x);
  if (states_only ? at.is_last_segment(partition) : at.chunks == 0 && !at.is_last_segment(partition)) return;
  if (threadIdx.x < partition.stages) {
    fwd.shared.full[threadIdx.x].init(Fwd::kCopyingThreads + kUnits * kWarpSize);
    fwd.shared.empty[threadIdx.x].init(kUnits * kUnitThreads);
  }
  __syncthreads();
  if (warpgroup == kUnits) {
    cuda::leave_registers<88>();
    fwd.move(at);
  } else {
    cuda::take_registers<208>();
    fwd.multiply(at, warpgroup);
  }
#endif
}

}  // namespace ssm_kernels::ssd
