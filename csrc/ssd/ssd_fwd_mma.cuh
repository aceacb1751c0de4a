// SSD chunk-scan, forward, with the products of cuda/warp_products.cuh, on every device, and for fp32. See ssd_fwd.cuh for what
// is computed.
//
// A block is its units' warps. Warp w of a unit computes rows 16 w to 16 w + 15 of M^T; the unit's warps exchange them through
// shared memory. Every warp copies its share of the chunks ahead, and each in turn makes its unit's tables of the next chunk's
// decays. In fp32, where all takes twice the room, M^T takes the place of C if there it fits, which all warps that read C have
// done with then; out, rounded where x was, is there rounded where M^T was, before the state takes more.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/named_barrier.cuh"
#include "ssd/ssd_columns.cuh"
#include "ssd/ssd_handover.cuh"

namespace ssm_kernels::ssd {

template <typename Scalar, int dstate>
struct alignas(128) MmaShared {
  using Units = UnitsOf<dstate>;
  using HeadTile = Tile<kUnitRows, sizeof(Scalar)>;
  using GroupTile = Tile<Units::kColumns, sizeof(Scalar)>;
  using PairTile = Tile<kChunk, sizeof(Scalar)>;
  static constexpr int kMaxStages = 3;
  struct Stage {
    GroupTile C[Units::kColumnBlocks], B[Units::kColumnBlocks];
    HeadTile x[Units::kRowBlocks];
  };
  static constexpr bool kSharesPairs = kIsFp32<Scalar> && !Units::kShareRows;
  static constexpr bool kIsInPlaceOfC = kIsFp32<Scalar> && sizeof(Stage::C) >= kUnits * sizeof(PairTile);
  struct OfUnit {
    std::conditional_t<kIsInPlaceOfC, Nothing, PairTile> products;  // M^T
    TablesOf<Scalar> tables[2];                                     // of the chunk at work and the next
  };
  OfUnit of_unit[kUnits];
  typename Units::PartOfOut part_of_out;

  __device__ __forceinline__ PairTile& products(int index, Stage& stage) {
    if constexpr (kIsInPlaceOfC) {
      return reinterpret_cast<PairTile*>(&stage.C)[sizeof(Stage::C) / kUnits / sizeof(PairTile) * index];
    } else {
      return of_unit[index].products;
    }
  }

  static SSM_HOST_DEVICE constexpr int stage_bytes(bool has_gate) {
    return static_cast<int>(sizeof(Stage) + (has_gate ? sizeof(Stage::x) : 0));
  }
  static SSM_HOST_DEVICE constexpr int bytes(int stages, bool has_gate) {
    return static_cast<int>(sizeof(MmaShared)) + stages * stage_bytes(has_gate);
  }
};

// Writes a unit's out, chunk by chunk: this warp's columns, through a tile of which each warp has columns of its own.
template <typename Scalar>
class OutWriter {
 public:
  using OutTile = Tile<kUnitRows, sizeof(Scalar)>;

  __device__ __forceinline__ OutWriter(const SsdFwdParams& p, const Place& at, const Unit& unit, const Lane& lane)
      : p_(p), rounder_(p, unit, lane) {
    const int column = piece(lane) * OutTile::kPieceElements;
    is_there_ = column < unit.rows;
    target_ = at.rows<Scalar>(p.out, unit.head, 0) + unit.first_row + column + row(lane) * p.out.stride_step;
  }

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const cuda::OperandA<Scalar> (&x)[kStepGroups],
                                        OutTile* z_tile, OutTile& tile, const Lane& lane, int steps) {
    rounder_.round(y, x, z_tile, tile, lane);
    __syncwarp();
    const uint4* const source = tile.piece(row(lane), piece(lane));
    const int rows = is_there_ ? steps - row(lane) : 0;
    uint4 pieces[kChunk / kRows];
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) pieces[i] = source[kRows * i * OutTile::kPartPieces];
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) {
      if (kRows * i < rows) __stcg(reinterpret_cast<uint4*>(target_), pieces[i]);
      target_ += kRows * p_.out.stride_step;
    }
    __syncwarp();
  }

 private:
  // Pieces of a warp's columns, and rows that it writes at once: eight lanes' pieces lie in different banks.
  static constexpr int kPieces = 16 / OutTile::kPieceElements, kRows = kWarpSize / kPieces;
  // Of what the lane writes: each kRows-th row from that on, and the piece.
  static __device__ __forceinline__ int row(const Lane& lane) {
    return kIsFp32<Scalar> ? lane.index / kPieces : lane.index % kRows;
  }
  static __device__ __forceinline__ int piece(const Lane& lane) {
    return kPieces * lane.warp + (kIsFp32<Scalar> ? lane.index % kPieces : lane.index / kRows);
  }

  const SsdFwdParams& p_;
  OutRounder<Scalar, InOrder> rounder_;
  bool is_there_;
  Scalar* target_;
};

// By that many threads.
template <int threads, typename AnyTile, int count>
__device__ __forceinline__ void clear_rows_before(AnyTile (&tiles)[count], int row) {
#pragma unroll
  for (int tile = 0; tile < count; ++tile) {
#pragma unroll 1
    for (int i = threadIdx.x; i < row * AnyTile::kPieces; i += threads) {
      *tiles[tile].piece(i / AnyTile::kPieces, i % AnyTile::kPieces) = {0, 0, 0, 0};
    }
  }
}

// Takes the state through a piece of a walk; returns the piece's decay.
template <typename Scalar, int dstate, bool states_only>
__device__ __forceinline__ float multiply_mma_piece(const SsdFwdParams& p, const Runs& runs, unsigned char* memory,
                                                    const Place& at, const Unit& unit, int index, const Lane& whole_lane,
                                                    State<UnitsOf<dstate>::kColumns>& state) {
  using Shared = MmaShared<Scalar, dstate>;
  using Units = UnitsOf<dstate>;
  using HeadTile = typename Shared::HeadTile;
  using GroupTile = typename Shared::GroupTile;
  constexpr int kStateGroups = Units::kColumns / 16, kThreads = kUnits * kUnitThreads;
  // In fp32 registers are few. Unrolled twice it was not faster.
  constexpr int kUnrolled = kIsFp32<Scalar> ? 1 : kStateGroups;
  constexpr int kThreadsOfRows = kThreads / Units::kRowBlocks;
  // There what follows from a thread's index is found anew for each part of the work, rather than kept in registers.
  const auto lane_anew = [&]() -> Lane {
    if constexpr (kIsFp32<Scalar>) return whole_lane.anew();
    return whole_lane;
  };
  const bool has_gate = !states_only && p.z.data != nullptr;
  const int rows = Units::row_block(index), columns = Units::column_block(index);
  auto& shared = *reinterpret_cast<Shared*>(memory);
  auto& own = shared.of_unit[index];
  const auto stage_at = [&](int slot) {
    return reinterpret_cast<typename Shared::Stage*>(memory + sizeof(Shared) + slot * Shared::stage_bytes(has_gate));
  };
  const auto z_at = [&](int slot) { return reinterpret_cast<HeadTile*>(stage_at(slot) + 1) + rows; };

  const auto copy = [&](int chunk) {
    if (chunk < at.chunks) {
      const int slot = chunk % runs.stages, steps = at.steps_of(chunk);
      auto& target = *stage_at(slot);
      int thread = threadIdx.x;
      if constexpr (kIsFp32<Scalar>) asm volatile("" : "+r"(thread));
      const auto copy_state_rows = [&](GroupTile(&tiles)[Units::kColumnBlocks], const RowsView& view) {
        const Scalar* const source = at.rows<Scalar>(view, at.group, chunk);
#pragma unroll
        for (int block = 0; block < Units::kColumnBlocks; ++block) {
          const int first = block * Units::kColumns;
          RowCopier<Scalar, Units::kColumns, kThreads>(source + first, view.stride_step, p.dstate - first, thread)
              .copy(tiles[block], steps, view.stride_step);
        }
      };
      const auto copy_head_rows = [&](HeadTile& tile, const RowsView& view) {
        const Scalar* const source = at.rows<Scalar>(view, unit.head, chunk) + unit.first_row;
        RowCopier<Scalar, kUnitRows, kThreadsOfRows>(source, view.stride_step, unit.rows, thread % kThreadsOfRows)
            .copy(tile, steps, view.stride_step);
      };
      copy_state_rows(target.B, p.B);
      if constexpr (!states_only) copy_state_rows(target.C, p.C);
      copy_head_rows(target.x[rows], p.x);
      if (has_gate) copy_head_rows(*z_at(slot), p.z);
    }
    cuda::commit_async_copies();
  };

  const HeadSteps head(p, unit.head);
  FetchedSteps<Scalar> fetched;
  const auto is_mine = [&](int chunk) { return chunk < at.chunks && chunk % kUnitWarps == whole_lane.warp; };
  const auto fetch = [&](int chunk) {
    if (!is_mine(chunk)) return;
    fetched.fetch(p, at.rows<const Scalar>(p.dt, unit.head, chunk), at.resets(p, chunk), at.steps_of(chunk));
  };
  const auto tabulate = [&](int chunk) {
    if (!is_mine(chunk)) return;
    TableSteps<1, Scalar> made;
    made.make(p, head, &fetched);
    made.store(0, own.tables[chunk % 2]);
  };

  const int prefetched = runs.stages - 1;
  for (int chunk = 0; chunk < prefetched; ++chunk) copy(chunk);
  fetch(0);
  fetch(1);  // another warp's
  tabulate(0);

  OutWriter<Scalar> out(p, at, unit, whole_lane);
  float decay_of_piece = 1;

  if constexpr (!states_only && !kIsFp32<Scalar>) clear_left_of_diagonal<InOrder>(own.products, whole_lane);
#pragma unroll 1
  for (int chunk = 0; chunk < at.chunks; ++chunk) {
    const int slot = chunk % runs.stages;
    if (runs.stages == 1) {
      __syncthreads();
      copy(chunk);
    }
    if (runs.stages == 3) {
      cuda::wait_for_async_copies<1>();
    } else {
      cuda::wait_for_async_copies<0>();
    }
    __syncthreads();
    if (runs.stages > 1) copy(chunk + prefetched);
    fetch(chunk + 2);

    const Lane lane = lane_anew();
    auto& tiles = *stage_at(slot);
    auto& x_tile = tiles.x[rows];
    const PairsOfTile<sizeof(Scalar)> pairs(lane);
    const auto describe = [&](auto& tile) {
      return cuda::describe_warp_operand<sizeof(Scalar)>(&tile, std::decay_t<decltype(tile)>::kPartBytes, lane.index);
    };
    const auto B = describe(tiles.B[columns]), C = describe(tiles.C[columns]);
    const auto& tables = own.tables[chunk % 2];

    if constexpr (kIsFp32<Scalar>) {
      if (tables.begins_anew) state.clear();
    }
    float y[kStepBlocks][4] = {};
    auto& products = shared.products(index, tiles);
    // What rounding leaves of this warp's rows of M^T.
    cuda::Packed<Scalar> rest[kStepBlocks][2] = {};
    if constexpr (!states_only) {
      // Two passes over C: its products with B and with the state at once would take too many registers.
      // In fp32 a loop, for which the registers of the state take turns: of one long sequence of products ptxas makes one
      // where each waits for that before.
      constexpr int kParts = GroupTile::kParts, kGroups = kStateGroups / kParts, kPartsAtOnce = kIsFp32<Scalar> ? 1 : kParts;
#pragma unroll kPartsAtOnce
      for (int part = 0; part < kParts; ++part) {
        const auto C_part = columns_of(C, part * kGroups);
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          cuda::OperandA<Scalar> s;
          state.template pack<Scalar>(k, s);
          cuda::multiply<Scalar, false>(y, s, columns_of(C_part, k), true);
        }
        state.rotate(2 * kGroups);
      }
      decay_from_start(y, tables, lane);
      // The units of different rows have the same (B C^T)^T: in fp32 each makes half of its columns, for all.
      constexpr int kBlocks = Shared::kSharesPairs ? kStepBlocks / kUnits : kStepBlocks;
      const int first_block = Shared::kSharesPairs ? kBlocks * index : 0;
      float m[kBlocks][4] = {};
#pragma unroll kUnrolled
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::multiply<Scalar, false, false>(m, columns_of(B, k), columns_of(rows_of(C, first_block / 2), k), true);
      }
      // Others read C still.
      if constexpr (Shared::kIsInPlaceOfC) __syncthreads();
      const auto weigh = [&](const TablesOf<Scalar>& tables_of_unit, auto& target) {
        const Lane of_lane = lane.anew();
        PairWeights<InOrder, true, TablesOf<Scalar>, kBlocks> weights(tables_of_unit, of_lane, first_block);
        weights.weigh(m, [&](float low, float high, int n, int half) {
          const cuda::Packed<Scalar> packed = cuda::pack<Scalar>(low, high);
          pairs.at(target, n, half) = packed;
          if constexpr (!kIsFp32<Scalar>) rest[n][half] = cuda::pack_rest<Scalar>(low, high, packed);
        });
        // Left of the diagonal, but multiplied.
        if constexpr (kIsFp32<Scalar>) {
          if (2 * lane.warp / kBlocks * kBlocks == first_block) pairs.at(target, 2 * lane.warp, 1) = {0, 0};
        }
      };
      if constexpr (Shared::kSharesPairs) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          weigh(shared.of_unit[unit].tables[chunk % 2], shared.products(unit, tiles));
        }
      } else {
        weigh(tables, products);
      }
    }

    const auto update_state = [&] {
      const Lane lane = lane_anew();
      int first = 0;  // step that the state after the chunk has something of
      if (has_begun(p, tables)) {
        state.clear();
        if constexpr (kIsFp32<Scalar>) {
          // Zero times NaN: no row of an earlier sequence is multiplied.
          first = tables.first[kChunk - 1];
          __syncthreads();
          clear_rows_before<kThreads>(tiles.B, first);
          __syncthreads();
        }
      } else {
        state.decay(tables.whole);
      }
      if (states_only) add_decay(p, decay_of_piece, tables);
#pragma unroll kUnrolled
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::OperandA<Scalar> x, weighed;
        load_inputs(x, x_tile, j, lane);
        if constexpr (kIsFp32<Scalar>) {
          weigh_inputs<Scalar>(x, tables.to_end, j, lane, weighed, first);
        } else {
          weigh_inputs<Scalar>(x, tables.to_end, j, lane, weighed);
        }
        cuda::multiply<Scalar, true>(state.values, weighed, rows_of(B, j), true);
      }
    };
    // With many columns of a state in fp32 registers are few: y is written before the state takes more.
    constexpr bool kEndsOutFirst = kIsFp32<Scalar> && dstate > 64;
    static_assert(kEndsOutFirst == Shared::kIsInPlaceOfC, "both are of more columns than a state of 64 has");
    const auto finish_out = [&] {
      const Lane lane = lane_anew();
      const auto M = describe(products);
      const auto add_products = [&] {
        constexpr int kUnrolledHere = kIsFp32<Scalar> ? 1 : kStepGroups;
#pragma unroll kUnrolledHere
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::OperandA<Scalar> x;
          load_inputs(x, x_tile, j, lane);
          cuda::multiply<Scalar, true>(y, x, rows_of(M, j), true, /*first_block=*/2 * j);
        }
      };
      if constexpr (Shared::kSharesPairs) {
        __syncthreads();
      } else {
        cuda::barrier_sync(1 + index, kUnitThreads);
      }
      if constexpr (kIsFp32<Scalar>) {
        add_products();
        if constexpr (kEndsOutFirst) cuda::barrier_sync(1 + index, kUnitThreads);
      } else {
        // Of 16 bits the rounded M^T and the rest one after the other in the same place: there may be no room for another tile.
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          if (part > 0) {
            cuda::barrier_sync(1 + index, kUnitThreads);
#pragma unroll
            for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
              for (int half = 0; half < 2; ++half) pairs.at(products, n, half) = rest[n][half];
            }
            cuda::barrier_sync(1 + index, kUnitThreads);
          }
          add_products();
        }
      }
      // In place of x, of which a warp of a unit reads only the columns that it writes, or of M^T, if x is still to be read.
      const auto write_out = [&] {
        cuda::OperandA<Scalar> x[kStepGroups];
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) load_inputs(x[j], x_tile, j, lane);
        auto& target = *(kEndsOutFirst ? &products : &x_tile);
        out.write(y, x, has_gate ? z_at(slot) : nullptr, target, lane, at.steps_of(chunk));
      };
      if constexpr (!Units::kShareRows) {
        write_out();
      } else if (Units::writes_out(index)) {
        shared.part_of_out.add_to(y);
        write_out();
      } else {
        shared.part_of_out.leave(y);
        shared.part_of_out.wait_until_read();
      }
    };
    if constexpr (states_only) {
      update_state();
    } else if constexpr (kEndsOutFirst) {
      finish_out();
      update_state();
    } else {
      update_state();
      finish_out();
    }
    tabulate(chunk + 1);
  }
  // What this piece had in shared memory the next one's copies write over.
  __syncthreads();
  return decay_of_piece;
}

// Whether the type of a kernel's parameters says if sequences are packed: where ptxas 13.0, with a predicate of it alive
// through the loop over chunks, took another value for it (docs/tuning.md).
template <typename Scalar, int dstate, bool states_only>
constexpr bool kKnowsWhetherPacked = kIsFp32<Scalar> && dstate <= 64 && !states_only;

template <typename Scalar, int dstate, bool states_only, typename Params>
__global__ void __launch_bounds__(kUnits* kUnitThreads, 1)
    ssd_fwd_mma_kernel(const __grid_constant__ Params p, const __grid_constant__ Runs runs) {
  extern __shared__ __align__(128) unsigned char memory[];
  static_assert(kKnowsWhetherPacked<Scalar, dstate, states_only> != std::is_same_v<Params, SsdFwdParams>,
                "PackedFwdParams or UnpackedFwdParams if and only if the kernel is compiled for one of them");
  take_run<states_only>(runs);
  __syncthreads();
  const int index = threadIdx.x / kUnitThreads;
  const Lane lane;
  using Units = UnitsOf<dstate>;
  walk_pieces<states_only, Units::kColumns>(
      p, runs, index, lane, [&](State<Units::kColumns>& state, const Place& at, const Unit& unit) {
        return multiply_mma_piece<Scalar, dstate, states_only>(p, runs, memory, at, unit, index, lane, state);
      });
}

}  // namespace ssm_kernels::ssd
