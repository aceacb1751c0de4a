// SSD chunk-scan, forward, with the products of compute capability 9.0a (cuda/wgmma.cuh). See ssd_fwd.cuh for what is
// computed.
//
// A block has a warpgroup for each of its two units, and one more that moves data: two of its warps copy the chunks ahead to
// shared memory, and one makes the tables of their decays for each unit (ssd_supply.cuh). Where only states are to be found it
// has two such warpgroups, whose warps take turns in making a unit's tables. A unit's products overlap with its
// other work: while S C^T runs, M^T is weighed; while S is updated, out is rounded.
//
// Of the steps that products sum over, the rows of B, x and M^T, tiles have those of both ends together (FromBothEnds), so that
// no warp has more of M^T to weigh than another. What is read of shared memory before a product ends is read before it begins:
// loads after products wait for them. out leaves by way of shared memory, as copies of whole tiles (ssd_tile_out.cuh), a
// chunk's while the next is under way.
//
// Products read registers that were made before any product under way began: the compiler waits for these where it cannot tell
// that registers are none of theirs, and before branches that it takes for divergent.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/register_trade.cuh"
#include "ssd/ssd_columns.cuh"
#include "ssd/ssd_handover.cuh"
#include "ssd/ssd_supply.cuh"
#include "ssd/ssd_tile_out.cuh"

namespace ssm_kernels::ssd {

// Of the kernel that only finds states, and of the one that scans.
template <int dstate>
struct StatesOnlyShared {
  using Units = UnitsOf<dstate>;
  static constexpr int kMaxStages = 6;
  struct Stage {
    Tile<Units::kColumns> B[Units::kColumnBlocks];
    Tile<kUnitRows> x[Units::kRowBlocks];
  };
};
template <int dstate>
struct ScanShared {
  using Units = UnitsOf<dstate>;
  static constexpr int kMaxStages = 3;
  struct Stage {
    Tile<Units::kColumns> B[Units::kColumnBlocks], C[Units::kColumnBlocks];
    Tile<kUnitRows> x[Units::kRowBlocks];
  };
  struct {
    Tile<kChunk> rounded, rest;
  } products[kUnits];  // M^T
  Tile<kUnitRows> out[Units::kRowBlocks];
  typename Units::PartOfOut part_of_out;
};

template <int dstate, bool states_only>
struct WgmmaShared : std::conditional_t<states_only, StatesOnlyShared<dstate>, ScanShared<dstate>> {
  using Base = std::conditional_t<states_only, StatesOnlyShared<dstate>, ScanShared<dstate>>;
  using Base::kMaxStages;
  using typename Base::Stage;
  ChunkTables tables[kMaxStages][kUnits];
  cuda::SharedBarrier full[kMaxStages], empty[kMaxStages];

  static SSM_HOST_DEVICE constexpr int align(int bytes) {
    return (bytes + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment;
  }
  static SSM_HOST_DEVICE constexpr int stage_bytes(bool has_gate) {
    return static_cast<int>(sizeof(Stage) + (has_gate ? sizeof(Stage::x) : 0));
  }
  static SSM_HOST_DEVICE constexpr int bytes(int stages, bool has_gate) {
    return kOperandAlignment + align(static_cast<int>(sizeof(WgmmaShared))) + stages * stage_bytes(has_gate);
  }
};

template <typename Scalar, int dstate, bool states_only, bool has_resets>
struct WgmmaFwd {
  // Warpgroups that move data: where only states are to be found, units are soon done with a chunk.
  static constexpr int kMovers = states_only ? 2 : 1, kThreads = (kUnits + kMovers) * kUnitThreads;
  static constexpr int kCopyingWarps = 2 * kMovers, kCopyingThreads = kCopyingWarps * kWarpSize;
  static_assert(kCopyingWarps + kMovers * kUnits == kMovers * kUnitWarps, "the others make tables, for one unit each");
  static_assert(has_resets || !states_only, "one kernel finds states");
  static constexpr int kTablesAtOnce = states_only ? 2 : 1;

  using Shared = WgmmaShared<dstate, states_only>;
  using Stage = typename Shared::Stage;
  using Units = UnitsOf<dstate>;
  using UnitState = State<Units::kColumns>;
  static constexpr int kStateGroups = Units::kColumns / 16;
  // Of the steps, down the rows of B and x, and of M^T.
  using Order = std::conditional_t<states_only, InOrder, FromBothEnds>;
  // Of a thread.
  static constexpr int kUnitRegisters = states_only ? 160 : dstate > 64 ? 208 : 192;
  static constexpr int kMoverRegisters = cuda::registers_left<kUnits * kUnitThreads, kUnitRegisters, kMovers * kUnitThreads>();

  const SsdFwdParams& p;
  const Runs& runs;
  Shared& shared;
  unsigned char* stages;
  bool has_gate;

  __device__ __forceinline__ WgmmaFwd(const SsdFwdParams& p, const Runs& runs, unsigned char* memory)
      : p(p),
        runs(runs),
        shared(*reinterpret_cast<Shared*>(memory)),
        stages(memory + Shared::align(sizeof(Shared))),
        has_gate(!states_only && p.z.data != nullptr) {}

  __device__ __forceinline__ Stage& stage(int slot) const {
    return *reinterpret_cast<Stage*>(stages + slot * Shared::stage_bytes(has_gate));
  }
  __device__ __forceinline__ Tile<kUnitRows>* z_tile(int slot, int unit) const {
    return reinterpret_cast<Tile<kUnitRows>*>(&stage(slot) + 1) + unit;
  }

  // The warpgroups after the units'.
  __device__ __forceinline__ void move() {
    const int warp = threadIdx.x / kWarpSize - kUnits * kUnitWarps;
    RingPosition ring;
    for_each_piece<states_only>(p, runs, [&](const auto&, const Place& at) {
      if (warp < kCopyingWarps) {
        copy(at, ring);
      } else {
        tabulate(at, (warp - kCopyingWarps) % kUnits, {(warp - kCopyingWarps) / kUnits}, ring);
      }
    });
  }

  __device__ __forceinline__ void tabulate(const Place& at, int index, Share<kMovers> share, RingPosition& ring) {
    const Unit unit(p, runs, at, index);
    supply_chunk_tables<Scalar, kTablesAtOnce, states_only>(
        p, at, unit.head, share, runs.stages, ring, shared.full, shared.empty, [](int chunk) { return chunk; },
        [&](int stage) -> ChunkTables& { return shared.tables[stage][index]; });
  }

  __device__ __forceinline__ void copy(const Place& at, RingPosition& ring) {
    // Opaque: what follows from it is found anew for each piece.
    int thread = threadIdx.x - kUnits * kUnitThreads;
    asm volatile("" : "+r"(thread));
    const auto of_group = [&](const RowsView& view, int block, auto order) {
      const int first = block * Units::kColumns;
      return RowCopier<Scalar, Units::kColumns, kCopyingThreads, decltype(order)>(
          at.template rows<Scalar>(view, at.group, 0) + first, view.stride_step, p.dstate - first, thread);
    };
    const auto of_unit = [&](const RowsView& view, int index, auto order) {
      const Unit unit(p, runs, at, index);
      return RowCopier<Scalar, kUnitRows, kCopyingThreads, decltype(order)>(
          at.template rows<Scalar>(view, unit.head, 0) + unit.first_row, view.stride_step, unit.rows, thread);
    };
    const RowsView& z = has_gate ? p.z : p.x;
    using CopierOfB = RowCopier<Scalar, Units::kColumns, kCopyingThreads, Order>;
    using CopierOfC = RowCopier<Scalar, Units::kColumns, kCopyingThreads>;
    CopierOfB copy_B[kUnits] = {of_group(p.B, 0, Order()), of_group(p.B, 1, Order())};
    RowCopier<Scalar, kUnitRows, kCopyingThreads, Order> copy_x[kUnits] = {of_unit(p.x, 0, Order()), of_unit(p.x, 1, Order())};
    CopierOfC copy_C[kUnits] = {of_group(p.C, 0, InOrder()), of_group(p.C, 1, InOrder())};
    RowCopier<Scalar, kUnitRows, kCopyingThreads> copy_z[kUnits] = {of_unit(z, 0, InOrder()), of_unit(z, 1, InOrder())};
    supply_copies<Shared::kMaxStages - 2>(at.chunks, runs.stages, ring, shared.full, shared.empty, [&](int chunk, int slot) {
      Stage& target = stage(slot);
      const int steps = at.steps_of(chunk);
#pragma unroll
      for (int index = 0; index < Units::kColumnBlocks; ++index) {
        copy_B[index].copy(target.B[index], steps, p.B.stride_step);
        if constexpr (!states_only) copy_C[index].copy(target.C[index], steps, p.C.stride_step);
      }
#pragma unroll
      for (int index = 0; index < Units::kRowBlocks; ++index) {
        copy_x[index].copy(target.x[index], steps, p.x.stride_step);
        if (has_gate) copy_z[index].copy(*z_tile(slot, index), steps, p.z.stride_step);
      }
    });
  }

  // A unit's warpgroup.
  __device__ __forceinline__ void multiply(int index) {
    const Lane lane = Lane::in_register();
    if constexpr (!states_only) {
      clear_left_of_diagonal<Order>(shared.products[index].rounded, lane);
      clear_left_of_diagonal<Order>(shared.products[index].rest, lane);
    }
    const PairsOfTile<> pairs(lane);
    RingPosition ring;
    walk_pieces<states_only, Units::kColumns>(p, runs, index, lane, [&](UnitState& state, const Place& at, const Unit& unit) {
      return multiply_piece(state, at, unit, index, pairs, lane, ring);
    });
    if constexpr (!states_only) TileOut<Scalar, Order>::wait_for_sent();
  }

  // Takes the state through the piece; returns the piece's decay.
  __device__ __forceinline__ float multiply_piece(UnitState& state, const Place& at, const Unit& unit, int index,
                                                  const PairsOfTile<>& pairs, const Lane& lane, RingPosition& ring) {
    // A unit without rows sends nothing.
    Unit of_out = unit;
    if (!Units::writes_out(index)) of_out.rows = 0;
    TileOut<Scalar, Order> out(p, at, of_out, lane);
    const int rows = Units::row_block(index), columns = Units::column_block(index);
    float decay_of_piece = 1;
#pragma unroll 1
    for (int left = at.chunks; left > 0; --left) {
      shared.full[ring.stage].wait(ring.phase);
      Stage& tiles = stage(ring.stage);
      const ChunkTables& tables = shared.tables[ring.stage][index];
      const uint64_t B_rows = describe(tiles.B[columns]);

      float y[kStepBlocks][4];
      if constexpr (!states_only) {
        const uint64_t C_rows = describe(tiles.C[columns]);
        float m[kStepBlocks][4];
        uint32_t s[kStateGroups][4];
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
        // Most of what weighing takes of the tables is loaded before the products: loads after them wait for them.
        const PairWeights<Order, has_resets> weights(tables, lane);
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
        // All warps have done with the M^T of the chunk before, and have written its out.
        cuda::barrier_sync(1 + index, kUnitThreads);
        if (left < at.chunks) out.send(shared.out[rows], at.chunks - left - 1);
        const PairsOfTile<> places = pairs.anew();
        auto& products = shared.products[index];
        weights.weigh(m, [&](float low, float high, int n, int half) {
          const uint32_t rounded = cuda::pack<Scalar>(low, high);
          places.at(products.rounded, n, half) = rounded;
          places.at(products.rest, n, half) = cuda::pack_rest<Scalar>(low, high, rounded);
        });
        cuda::publish_to_products();
      }

      uint32_t x[kStepGroups][4], weighed[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::load_matrices_transposed(x[j], tiles.x[rows].columns_first(16 * j, 2 * lane.warp, lane.index));
        weigh_inputs<Scalar, Order>(x[j], tables.to_end, j, lane, weighed[j]);
      }

      if constexpr (!states_only) {
        cuda::wait_for_products<0>(y);
        decay_from_start(y, tables, lane);
        out.wait_for_sent();
        cuda::barrier_sync(1 + index, kUnitThreads);
        cuda::fence_products();
        const uint64_t m_rows = describe(shared.products[index].rounded), rest_rows = describe(shared.products[index].rest);
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::multiply<Scalar, true>(y, x[j], rows_of(m_rows, j), true);
          cuda::multiply<Scalar, true>(y, x[j], rows_of(rest_rows, j), true);
        }
        cuda::commit_products();
      } else {
        add_decay(p, decay_of_piece, tables);
      }

      state.decay(tables.whole);
      cuda::fence_products();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::multiply<Scalar, true>(state.values, weighed[j], rows_of(B_rows, j),
                                     j > 0 || !(has_resets && has_begun(p, tables)));
      }
      cuda::commit_products();

      if constexpr (!states_only) {
        cuda::wait_for_products<1>(y);
        const auto write_out = [&] { out.write(y, x, has_gate ? z_tile(ring.stage, rows) : nullptr, shared.out[rows], lane); };
        if constexpr (!Units::kShareRows) {
          write_out();
        } else if (Units::writes_out(index)) {
          shared.part_of_out.add_to(y);
          write_out();
        } else {
          shared.part_of_out.leave(y);
        }
      }
      cuda::wait_for_products<0>(state.values);
      shared.empty[ring.stage].arrive();
      ring.advance(runs.stages);
      if constexpr (!states_only && Units::kShareRows) {
        if (!Units::writes_out(index)) shared.part_of_out.wait_until_read();
      }
    }
    if constexpr (!states_only) {
      cuda::barrier_sync(1 + index, kUnitThreads);
      out.send_last(shared.out[rows]);
    }
    return decay_of_piece;
  }
};

// has_resets: whether p.resets may be there. Where only states are found that costs too little for two kernels.
template <typename Scalar, int dstate, bool states_only, bool has_resets>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? WgmmaFwd<Scalar, dstate, states_only, has_resets>::kThreads
                                                        : kWarpSize,
                                  1)
    ssd_fwd_wgmma_kernel(const __grid_constant__ SsdFwdParams p, const __grid_constant__ Runs runs) {
#if SSM_KERNELS_HAS_WGMMA
  using Fwd = WgmmaFwd<Scalar, dstate, states_only, has_resets>;
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename Fwd::Shared>(unaligned_memory);
  Fwd fwd(p, runs, reinterpret_cast<unsigned char*>(&shared));

  // By a shuffle the compiler sees that it is the same for all lanes.
  const int warpgroup = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kUnitThreads, 0);
  if (threadIdx.x < runs.stages) {
    fwd.shared.full[threadIdx.x].init(Fwd::kCopyingThreads + kUnits * kWarpSize);
    fwd.shared.empty[threadIdx.x].init(kUnits * kUnitThreads);
  }
  take_run<states_only>(runs);
  __syncthreads();
  if (warpgroup >= kUnits) {
    cuda::leave_registers<Fwd::kMoverRegisters>();
    fwd.move();
  } else {
    cuda::take_registers<Fwd::kUnitRegisters>();
    fwd.multiply(warpgroup);
  }
#endif
}

}  // namespace ssm_kernels::ssd
