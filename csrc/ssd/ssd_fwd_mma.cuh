// SSD chunk-scan, forward, with the products of cuda/mma.cuh, on every device. See ssd_fwd.cuh for what is computed.
//
// A block is its units' warps. Warp w of a unit computes rows 16 w to 16 w + 15 of M^T; the unit's warps exchange them through
// shared memory. Every warp copies its share of the chunks ahead, and each in turn makes its unit's tables of the next chunk's
// decays.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/named_barrier.cuh"
#include "ssd/ssd_columns.cuh"
#include "ssd/ssd_handover.cuh"

namespace ssm_kernels::ssd {

template <int dstate>
struct MmaShared {
  using Units = UnitsOf<dstate>;
  static constexpr int kMaxStages = 3;
  struct Stage {
    Tile<Units::kColumns> C[Units::kColumnBlocks], B[Units::kColumnBlocks];
    Tile<kUnitRows> x[Units::kRowBlocks];
  };
  struct OfUnit {
    Tile<kChunk> products;  // M^T
    ChunkTables tables[2];  // of the chunk at work and the next
  };
  OfUnit of_unit[kUnits];
  typename Units::PartOfOut part_of_out;

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
  __device__ __forceinline__ OutWriter(const SsdFwdParams& p, const Place& at, const Unit& unit, const Lane& lane)
      : p_(p), rounder_(p, unit, lane) {
    const int column = piece(lane) * Tile<kUnitRows>::kPieceElements;
    is_there_ = column < unit.rows;
    target_ = at.rows<Scalar>(p.out, unit.head, 0) + unit.first_row + column + row(lane) * p.out.stride_step;
  }

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        Tile<kUnitRows>* z_tile, Tile<kUnitRows>& tile, const Lane& lane, int steps) {
    rounder_.round(y, x, z_tile, tile, lane);
    __syncwarp();
    const uint4* const source = tile.piece(row(lane), piece(lane));
    const int rows = is_there_ ? steps - row(lane) : 0;
    uint4 pieces[kChunk / 16];
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) pieces[i] = source[16 * i * Tile<kUnitRows>::kPartPieces];
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      if (16 * i < rows) __stcg(reinterpret_cast<uint4*>(target_), pieces[i]);
      target_ += 16 * p_.out.stride_step;
    }
    __syncwarp();
  }

 private:
  // Of what the lane writes: each 16th row from that on, and the piece.
  static __device__ __forceinline__ int row(const Lane& lane) { return lane.index % 16; }
  static __device__ __forceinline__ int piece(const Lane& lane) { return 2 * lane.warp + lane.index / 16; }

  const SsdFwdParams& p_;
  OutRounder<Scalar, InOrder> rounder_;
  bool is_there_;
  Scalar* target_;
};

// Takes the state through a piece of a walk; returns the piece's decay.
template <typename Scalar, int dstate, bool states_only>
__device__ __forceinline__ float multiply_mma_piece(const SsdFwdParams& p, const Runs& runs, unsigned char* memory,
                                                    const Place& at, const Unit& unit, int index, const Lane& lane,
                                                    State<UnitsOf<dstate>::kColumns>& state) {
  using Shared = MmaShared<dstate>;
  using Units = UnitsOf<dstate>;
  using UnitState = State<Units::kColumns>;
  constexpr int kStateGroups = Units::kColumns / 16, kThreads = kUnits * kUnitThreads;
  constexpr int kThreadsOfRows = kThreads / Units::kRowBlocks;
  const bool has_gate = !states_only && p.z.data != nullptr;
  const int rows = Units::row_block(index), columns = Units::column_block(index);
  auto& shared = *reinterpret_cast<Shared*>(memory);
  auto& own = shared.of_unit[index];
  const auto stage_at = [&](int slot) {
    return reinterpret_cast<typename Shared::Stage*>(memory + sizeof(Shared) + slot * Shared::stage_bytes(has_gate));
  };
  const auto z_at = [&](int slot) { return reinterpret_cast<Tile<kUnitRows>*>(stage_at(slot) + 1) + rows; };

  const auto copy = [&](int chunk) {
    if (chunk < at.chunks) {
      const int slot = chunk % runs.stages, steps = at.steps_of(chunk);
      auto& target = *stage_at(slot);
      const auto copy_state_rows = [&](Tile<Units::kColumns>(&tiles)[Units::kColumnBlocks], const RowsView& view) {
        const Scalar* const source = at.rows<Scalar>(view, at.group, chunk);
#pragma unroll
        for (int block = 0; block < Units::kColumnBlocks; ++block) {
          const int first = block * Units::kColumns;
          RowCopier<Units::kColumns, kThreads>(source + first, view.stride_step, p.dstate - first, threadIdx.x)
              .copy(tiles[block], steps, view.stride_step);
        }
      };
      const auto copy_head_rows = [&](Tile<kUnitRows>& tile, const RowsView& view) {
        const Scalar* const source = at.rows<Scalar>(view, unit.head, chunk) + unit.first_row;
        RowCopier<kUnitRows, kThreadsOfRows>(source, view.stride_step, unit.rows, threadIdx.x % kThreadsOfRows)
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
  const auto is_mine = [&](int chunk) { return chunk < at.chunks && chunk % kUnitWarps == lane.warp; };
  const auto fetch = [&](int chunk) {
    if (!is_mine(chunk)) return;
    fetched.fetch(p, at.rows<const Scalar>(p.dt, unit.head, chunk), at.resets(p, chunk), at.steps_of(chunk));
  };
  const auto tabulate = [&](int chunk) {
    if (!is_mine(chunk)) return;
    TableSteps<1> made;
    made.make(p, head, &fetched);
    made.store(0, own.tables[chunk % 2]);
  };

  const int prefetched = runs.stages - 1;
  for (int chunk = 0; chunk < prefetched; ++chunk) copy(chunk);
  fetch(0);
  fetch(1);  // another warp's
  tabulate(0);

  OutWriter<Scalar> out(p, at, unit, lane);
  const PairsOfTile pairs(lane);
  float decay_of_piece = 1;

  if constexpr (!states_only) clear_left_of_diagonal<InOrder>(own.products, lane);
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

    auto& tiles = *stage_at(slot);
    auto &B = tiles.B[columns], &C = tiles.C[columns];
    auto& x_tile = tiles.x[rows];
    const ChunkTables& tables = own.tables[chunk % 2];

    float y[kStepBlocks][4] = {};
    uint32_t rest[kStepBlocks][2] = {};  // what rounding leaves of this warp's rows of M^T
    if constexpr (!states_only) {
      // Two passes over C: its products with B and with the state at once would take too many registers.
      {
        float m[kStepBlocks][4] = {};
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) {
          uint32_t b[4];
          cuda::load_matrices(b, B.rows_first(16 * lane.warp, 2 * k, lane.index));
#pragma unroll
          for (int i = 0; i < kStepGroups; ++i) {
            uint32_t c[4];
            cuda::load_matrices(c, C.columns_first(16 * i, 2 * k, lane.index));
            cuda::mma<Scalar>(m[2 * i], b, c[0], c[1]);
            cuda::mma<Scalar>(m[2 * i + 1], b, c[2], c[3]);
          }
        }
        PairWeights<InOrder, true>(tables, lane.anew()).weigh(m, [&](float low, float high, int n, int half) {
          const uint32_t rounded = cuda::pack<Scalar>(low, high);
          pairs.at(own.products, n, half) = rounded;
          rest[n][half] = cuda::pack_rest<Scalar>(low, high, rounded);
        });
      }
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) {
        uint32_t s[4];
        state.template pack<Scalar>(k, s);
#pragma unroll
        for (int i = 0; i < kStepGroups; ++i) {
          uint32_t c[4];
          cuda::load_matrices(c, C.columns_first(16 * i, 2 * k, lane.index));
          cuda::mma<Scalar>(y[2 * i], s, c[0], c[1]);
          cuda::mma<Scalar>(y[2 * i + 1], s, c[2], c[3]);
        }
      }
      decay_from_start(y, tables, lane);
    }

    if (has_begun(p, tables)) {
      state.clear();
    } else {
      state.decay(tables.whole);
    }
    if (states_only) add_decay(p, decay_of_piece, tables);
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) {
      uint32_t x[4], weighed[4];
      cuda::load_matrices_transposed(x, x_tile.columns_first(16 * j, 2 * lane.warp, lane.index));
      weigh_inputs<Scalar>(x, tables.to_end, j, lane, weighed);
#pragma unroll
      for (int n = 0; n < UnitState::kBlocks / 2; ++n) {
        uint32_t b[4];
        cuda::load_matrices_transposed(b, B.rows_first(16 * j, 2 * n, lane.index));
        cuda::mma<Scalar>(state.values[2 * n], weighed, b[0], b[1]);
        cuda::mma<Scalar>(state.values[2 * n + 1], weighed, b[2], b[3]);
      }
    }

    if constexpr (!states_only) {
      uint32_t x[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::load_matrices_transposed(x[j], x_tile.columns_first(16 * j, 2 * lane.warp, lane.index));
      }
      // The rounded M^T and the rest one after the other in the same place: there may be no room for another tile.
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        if (part > 0) {
          cuda::barrier_sync(1 + index, kUnitThreads);
#pragma unroll
          for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) pairs.at(own.products, n, half) = rest[n][half];
          }
        }
        cuda::barrier_sync(1 + index, kUnitThreads);
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
#pragma unroll
          for (int i = j; i < kStepGroups; ++i) {
            uint32_t m[4];
            cuda::load_matrices_transposed(m, own.products.rows_first(16 * j, 2 * i, lane.index));
            cuda::mma<Scalar>(y[2 * i], x[j], m[0], m[1]);
            cuda::mma<Scalar>(y[2 * i + 1], x[j], m[2], m[3]);
          }
        }
      }
      // In place of x, of which a warp of a unit reads only the columns that it writes.
      const auto write_out = [&] { out.write(y, x, has_gate ? z_at(slot) : nullptr, x_tile, lane, at.steps_of(chunk)); };
      if constexpr (!Units::kShareRows) {
        write_out();
      } else if (Units::writes_out(index)) {
        shared.part_of_out.add_to(y);
        write_out();
      } else {
        shared.part_of_out.leave(y);
        shared.part_of_out.wait_until_read();
      }
    }
    tabulate(chunk + 1);
  }
  // What this piece had in shared memory the next one's copies write over.
  __syncthreads();
  return decay_of_piece;
}

template <typename Scalar, int dstate, bool states_only>
__global__ void __launch_bounds__(kUnits* kUnitThreads, 1)
    ssd_fwd_mma_kernel(const __grid_constant__ SsdFwdParams p, const __grid_constant__ Runs runs) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int index = threadIdx.x / kUnitThreads;
  const Lane lane;
  using Units = UnitsOf<dstate>;
  walk_pieces<states_only, Units::kColumns>(
      p, runs, index, lane, [&](State<Units::kColumns>& state, const Place& at, const Unit& unit) {
        return multiply_mma_piece<Scalar, dstate, states_only>(p, runs, memory, at, unit, index, lane, state);
      });
}

}  // namespace ssm_kernels::ssd
