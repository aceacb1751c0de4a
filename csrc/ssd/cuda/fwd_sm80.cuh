// SSD chunk-scan, forward, with the products of cuda/warp_mma.cuh, on every device, and for fp32. See fwd.cuh for what
// is computed.
//
// A block is its units' warps. Warp w of a unit computes rows 16 w to 16 w + 15 of M^T; the unit's warps exchange them through
// shared memory. Every warp copies its share of the chunks ahead, and each in turn makes its unit's tables of the next chunk's
// decays. In fp32, where all takes twice the room, M^T takes the place of C if there it fits, which all warps that read C have
// done with then; out, rounded where x was, is there rounded where M^T was, before the state takes more.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "ssd/cuda/state_carry.cuh"
#include "ssd/cuda/warpgroup_layout.cuh"

namespace ssm_kernels::ssd {

template <typename Scalar, int dstate>
struct alignas(128) Sm80Shared {
  using Layout = WarpgroupLayout<dstate>;
  using HeadTile = SmemTile<kStateRows, sizeof(Scalar)>;
  using GroupTile = SmemTile<Layout::kColumns, sizeof(Scalar)>;
  using PairTile = SmemTile<kChunk, sizeof(Scalar)>;
  static constexpr int kMaxStages = 3;
  struct Stage {
    GroupTile C[Layout::kColumnBlocks], B[Layout::kColumnBlocks];
    HeadTile x[Layout::kRowBlocks];
  };
  static constexpr bool kSharesBmm = kIsFp32<Scalar> && !Layout::kShareRows;
  static constexpr bool kIsInPlaceOfC = kIsFp32<Scalar> && sizeof(Stage::C) >= kWarpgroups * sizeof(PairTile);
  struct PerWarpgroup {
    std::conditional_t<kIsInPlaceOfC, Empty, PairTile> bmm;  // M^T
    TablesOf<Scalar> tables[2];                              // of the chunk at work and the next
  };
  PerWarpgroup per_warpgroup[kWarpgroups];
  typename Layout::PartialOut partial_out;

  __device__ __forceinline__ PairTile& bmm(int index, Stage& stage) {
    if constexpr (kIsInPlaceOfC) {
      return reinterpret_cast<PairTile*>(&stage.C)[sizeof(Stage::C) / kWarpgroups / sizeof(PairTile) * index];
    } else {
      return per_warpgroup[index].bmm;
    }
  }

  static SSM_HOST_DEVICE constexpr int stage_bytes(bool has_gate) {
    return static_cast<int>(sizeof(Stage) + (has_gate ? sizeof(Stage::x) : 0));
  }
  static SSM_HOST_DEVICE constexpr int bytes(int stages, bool has_gate) {
    return static_cast<int>(sizeof(Sm80Shared)) + stages * stage_bytes(has_gate);
  }
};

// Writes a unit's out, chunk by chunk: this warp's columns, through a tile of which each warp has columns of its own.
template <typename Scalar>
class RegisterEpilogue {
 public:
  using OutTile = SmemTile<kStateRows, sizeof(Scalar)>;

  __device__ __forceinline__ RegisterEpilogue(const SsdFwdParams& p, const WorkSpan& at, const StateTile& state_tile,
                                              const FragmentLane& lane)
      : p_(p), math_(p, state_tile, lane) {
    const int column = vector(lane) * OutTile::kVectorElements;
    is_there_ = column < state_tile.rows;
    target_ = at.rows<Scalar>(p.out, state_tile.head, 0) + state_tile.first_row + column + row(lane) * p.out.stride_step;
  }

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const cuda::OperandA<Scalar> (&x)[kStepGroups],
                                        OutTile* z_tile, OutTile& tile, const FragmentLane& lane, int steps) {
    math_.round(y, x, z_tile, tile, lane);
    __syncwarp();
    const uint4* const source = tile.vector(row(lane), vector(lane));
    const int rows = is_there_ ? steps - row(lane) : 0;
    uint4 vectors[kChunk / kRows];
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) vectors[i] = source[kRows * i * OutTile::kPanelVectors];
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) {
      if (kRows * i < rows) __stcg(reinterpret_cast<uint4*>(target_), vectors[i]);
      target_ += kRows * p_.out.stride_step;
    }
    __syncwarp();
  }

 private:
  // TileScheduler of a warp's columns, and rows that it writes at once: eight lanes' pieces lie in different banks.
  static constexpr int kVectors = 16 / OutTile::kVectorElements, kRows = kWarpSize / kVectors;
  // Of what the lane writes: each kRows-th row from that on, and the piece.
  static __device__ __forceinline__ int row(const FragmentLane& lane) {
    return kIsFp32<Scalar> ? lane.index / kVectors : lane.index % kRows;
  }
  static __device__ __forceinline__ int vector(const FragmentLane& lane) {
    return kVectors * lane.warp + (kIsFp32<Scalar> ? lane.index % kVectors : lane.index / kRows);
  }

  const SsdFwdParams& p_;
  EpilogueMath<Scalar, InOrder> math_;
  bool is_there_;
  Scalar* target_;
};

// By that many threads.
template <int threads, typename AnyTile, int count>
__device__ __forceinline__ void clear_rows_before(AnyTile (&tiles)[count], int row) {
#pragma unroll
  for (int tile = 0; tile < count; ++tile) {
#pragma unroll 1
    for (int i = threadIdx.x; i < row * AnyTile::kVectors; i += threads) {
      *tiles[tile].vector(i / AnyTile::kVectors, i % AnyTile::kVectors) = {0, 0, 0, 0};
    }
  }
}

// Takes the state through a piece of a walk; returns the piece's decay.
template <typename Scalar, int dstate, bool states_only>
__device__ __forceinline__ float scan_segment_sm80(const SsdFwdParams& p, const Schedule& schedule, unsigned char* memory,
                                                   const WorkSpan& at, const StateTile& state_tile, int index,
                                                   const FragmentLane& thread_lane,
                                                   State<WarpgroupLayout<dstate>::kColumns>& state) {
  using Shared = Sm80Shared<Scalar, dstate>;
  using Layout = WarpgroupLayout<dstate>;
  using HeadTile = typename Shared::HeadTile;
  using GroupTile = typename Shared::GroupTile;
  constexpr int kStateGroups = Layout::kColumns / 16, kThreads = kWarpgroups * kWarpgroupThreads;
  // In fp32 registers are few. Unrolled twice it was not faster.
  constexpr int kUnrolled = kIsFp32<Scalar> ? 1 : kStateGroups;
  constexpr int kThreadsOfRows = kThreads / Layout::kRowBlocks;
  // There what follows from a thread's index is computed again for each part of the work, rather than kept in registers.
  const auto opaque_lane = [&]() -> FragmentLane {
    if constexpr (kIsFp32<Scalar>) return thread_lane.opaque();
    return thread_lane;
  };
  const bool has_gate = !states_only && p.z.data != nullptr;
  const int rows = Layout::row_block(index), columns = Layout::column_block(index);
  auto& shared = *reinterpret_cast<Shared*>(memory);
  auto& own = shared.per_warpgroup[index];
  const auto stage_at = [&](int stage_index) {
    return reinterpret_cast<typename Shared::Stage*>(memory + sizeof(Shared) + stage_index * Shared::stage_bytes(has_gate));
  };
  const auto z_at = [&](int stage_index) { return reinterpret_cast<HeadTile*>(stage_at(stage_index) + 1) + rows; };

  const auto copy = [&](int chunk) {
    if (chunk < at.chunks) {
      const int stage_index = chunk % schedule.stages, steps = at.steps_of(chunk);
      auto& target = *stage_at(stage_index);
      int thread = threadIdx.x;
      if constexpr (kIsFp32<Scalar>) asm volatile("" : "+r"(thread));
      const auto copy_state_rows = [&](GroupTile(&tiles)[Layout::kColumnBlocks], const RowsView& view) {
        const Scalar* const source = at.rows<Scalar>(view, at.group, chunk);
#pragma unroll
        for (int block = 0; block < Layout::kColumnBlocks; ++block) {
          const int first = block * Layout::kColumns;
          RowCopier<Scalar, Layout::kColumns, kThreads>(source + first, view.stride_step, p.dstate - first, thread)
              .copy(tiles[block], steps, view.stride_step);
        }
      };
      const auto copy_head_rows = [&](HeadTile& tile, const RowsView& view) {
        const Scalar* const source = at.rows<Scalar>(view, state_tile.head, chunk) + state_tile.first_row;
        RowCopier<Scalar, kStateRows, kThreadsOfRows>(source, view.stride_step, state_tile.rows, thread % kThreadsOfRows)
            .copy(tile, steps, view.stride_step);
      };
      copy_state_rows(target.B, p.B);
      if constexpr (!states_only) copy_state_rows(target.C, p.C);
      copy_head_rows(target.x[rows], p.x);
      if (has_gate) copy_head_rows(*z_at(stage_index), p.z);
    }
    cuda::cp_async_commit();
  };

  const HeadSteps head(p, state_tile.head);
  FetchedSteps<Scalar> fetched;
  const auto is_mine = [&](int chunk) { return chunk < at.chunks && chunk % kWarpgroupWarps == thread_lane.warp; };
  const auto fetch = [&](int chunk) {
    if (!is_mine(chunk)) return;
    fetched.fetch(p, at.rows<const Scalar>(p.dt, state_tile.head, chunk), at.resets(p, chunk), at.steps_of(chunk));
  };
  const auto chunk_cumsum = [&](int chunk) {
    if (!is_mine(chunk)) return;
    ChunkCumsum<1, Scalar> made;
    made.make(p, head, &fetched);
    made.store(0, own.tables[chunk % 2]);
  };

  const int prefetched = schedule.stages - 1;
  for (int chunk = 0; chunk < prefetched; ++chunk) copy(chunk);
  fetch(0);
  fetch(1);  // another warp's
  chunk_cumsum(0);

  RegisterEpilogue<Scalar> out(p, at, state_tile, thread_lane);
  float segment_decay = 1;

  if constexpr (!states_only && !kIsFp32<Scalar>) clear_left_of_diagonal<InOrder>(own.bmm, thread_lane);
#pragma unroll 1
  for (int chunk = 0; chunk < at.chunks; ++chunk) {
    const int stage_index = chunk % schedule.stages;
    if (schedule.stages == 1) {
      __syncthreads();
      copy(chunk);
    }
    if (schedule.stages == 3) {
      cuda::cp_async_wait<1>();
    } else {
      cuda::cp_async_wait<0>();
    }
    __syncthreads();
    if (schedule.stages > 1) copy(chunk + prefetched);
    fetch(chunk + 2);

    const FragmentLane lane = opaque_lane();
    auto& tiles = *stage_at(stage_index);
    auto& x_tile = tiles.x[rows];
    const FragmentPairs<sizeof(Scalar)> pairs(lane);
    const auto describe = [&](auto& tile) {
      return cuda::make_warp_operand<sizeof(Scalar)>(&tile, std::decay_t<decltype(tile)>::kPanelBytes, lane.index);
    };
    const auto B = describe(tiles.B[columns]), C = describe(tiles.C[columns]);
    const auto& tables = own.tables[chunk % 2];

    if constexpr (kIsFp32<Scalar>) {
      if (tables.starts_with_reset) state.clear();
    }
    float y[kStepBlocks][4] = {};
    auto& bmm = shared.bmm(index, tiles);
    // What rounding leaves of this warp's rows of M^T.
    cuda::Packed<Scalar> lo[kStepBlocks][2] = {};
    if constexpr (!states_only) {
      // Two passes over C: its products with B and with the state at once would take too many registers.
      // In fp32 a loop, for which the registers of the state take turns: of one long sequence of products ptxas makes one
      // where each waits for that before.
      constexpr int kPanels = GroupTile::kPanels, kGroups = kStateGroups / kPanels,
                    kPanelsAtOnce = kIsFp32<Scalar> ? 1 : kPanels;
#pragma unroll kPanelsAtOnce
      for (int panel = 0; panel < kPanels; ++panel) {
        const auto C_panel = columns_of(C, panel * kGroups);
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          cuda::OperandA<Scalar> s;
          state.template pack<Scalar>(k, s);
          cuda::gemm<Scalar, false>(y, s, columns_of(C_panel, k), true);
        }
        state.rotate(2 * kGroups);
      }
      scale_by_exp_cumsum(y, tables, lane);
      // The units of different rows have the same (B C^T)^T: in fp32 each makes half of its columns, for all.
      constexpr int kBlocks = Shared::kSharesBmm ? kStepBlocks / kWarpgroups : kStepBlocks;
      const int first_block = Shared::kSharesBmm ? kBlocks * index : 0;
      float m[kBlocks][4] = {};
#pragma unroll kUnrolled
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::gemm<Scalar, false, false>(m, columns_of(B, k), columns_of(rows_of(C, first_block / 2), k), true);
      }
      // Others read C still.
      if constexpr (Shared::kIsInPlaceOfC) __syncthreads();
      const auto apply_mask = [&](const TablesOf<Scalar>& tile_tables, auto& target) {
        const FragmentLane of_lane = lane.opaque();
        DecayMask<InOrder, true, TablesOf<Scalar>, kBlocks> mask(tile_tables, of_lane, first_block);
        mask.apply(m, [&](float low, float high, int n, int half) {
          const cuda::Packed<Scalar> packed = cuda::pack<Scalar>(low, high);
          pairs.at(target, n, half) = packed;
          if constexpr (!kIsFp32<Scalar>) lo[n][half] = cuda::pack_lo<Scalar>(low, high, packed);
        });
        // Left of the diagonal, but multiplied.
        if constexpr (kIsFp32<Scalar>) {
          if (2 * lane.warp / kBlocks * kBlocks == first_block) pairs.at(target, 2 * lane.warp, 1) = {0, 0};
        }
      };
      if constexpr (Shared::kSharesBmm) {
#pragma unroll
        for (int state_tile = 0; state_tile < kWarpgroups; ++state_tile) {
          apply_mask(shared.per_warpgroup[state_tile].tables[chunk % 2], shared.bmm(state_tile, tiles));
        }
      } else {
        apply_mask(tables, bmm);
      }
    }

    const auto chunk_state = [&] {
      const FragmentLane lane = opaque_lane();
      int first = 0;  // step that the state after the chunk has something of
      if (has_reset(p, tables)) {
        state.clear();
        if constexpr (kIsFp32<Scalar>) {
          // Zero times NaN: no row of an earlier sequence is multiplied.
          first = tables.first[kChunk - 1];
          __syncthreads();
          clear_rows_before<kThreads>(tiles.B, first);
          __syncthreads();
        }
      } else {
        state.decay(tables.chunk_decay);
      }
      if (states_only) add_decay(p, segment_decay, tables);
#pragma unroll kUnrolled
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::OperandA<Scalar> x, scaled;
        load_inputs(x, x_tile, j, lane);
        if constexpr (kIsFp32<Scalar>) {
          scale_inputs<Scalar>(x, tables.gain_to_chunk_end, j, lane, scaled, first);
        } else {
          scale_inputs<Scalar>(x, tables.gain_to_chunk_end, j, lane, scaled);
        }
        cuda::gemm<Scalar, true>(state.values, scaled, rows_of(B, j), true);
      }
    };
    // With many columns of a state in fp32 registers are few: y is written before the state takes more.
    constexpr bool kEndsOutFirst = kIsFp32<Scalar> && dstate > 64;
    static_assert(kEndsOutFirst == Shared::kIsInPlaceOfC, "both are of more columns than a state of 64 has");
    const auto chunk_scan = [&] {
      const FragmentLane lane = opaque_lane();
      const auto M = describe(bmm);
      const auto add_intra_chunk = [&] {
        constexpr int kUnrolledHere = kIsFp32<Scalar> ? 1 : kStepGroups;
#pragma unroll kUnrolledHere
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::OperandA<Scalar> x;
          load_inputs(x, x_tile, j, lane);
          cuda::gemm<Scalar, true>(y, x, rows_of(M, j), true, /*first_block=*/2 * j);
        }
      };
      if constexpr (Shared::kSharesBmm) {
        __syncthreads();
      } else {
        cuda::barrier_sync(1 + index, kWarpgroupThreads);
      }
      if constexpr (kIsFp32<Scalar>) {
        add_intra_chunk();
        if constexpr (kEndsOutFirst) cuda::barrier_sync(1 + index, kWarpgroupThreads);
      } else {
        // Of 16 bits the rounded M^T and the rest one after the other in the same place: there may be no room for another tile.
#pragma unroll 1
        for (int term = 0; term < 2; ++term) {
          if (term > 0) {
            cuda::barrier_sync(1 + index, kWarpgroupThreads);
#pragma unroll
            for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
              for (int half = 0; half < 2; ++half) pairs.at(bmm, n, half) = lo[n][half];
            }
            cuda::barrier_sync(1 + index, kWarpgroupThreads);
          }
          add_intra_chunk();
        }
      }
      // In place of x, of which a warp of a unit reads only the columns that it writes, or of M^T, if x is still to be read.
      const auto write_out = [&] {
        cuda::OperandA<Scalar> x[kStepGroups];
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) load_inputs(x[j], x_tile, j, lane);
        auto& target = *(kEndsOutFirst ? &bmm : &x_tile);
        out.write(y, x, has_gate ? z_at(stage_index) : nullptr, target, lane, at.steps_of(chunk));
      };
      if constexpr (!Layout::kShareRows) {
        write_out();
      } else if (Layout::writes_out(index)) {
        shared.partial_out.add_to(y);
        write_out();
      } else {
        shared.partial_out.put(y);
        shared.partial_out.wait_until_read();
      }
    };
    if constexpr (states_only) {
      chunk_state();
    } else if constexpr (kEndsOutFirst) {
      chunk_scan();
      chunk_state();
    } else {
      chunk_state();
      chunk_scan();
    }
    chunk_cumsum(chunk + 1);
  }
  // What this piece had in shared memory the next one's copies write over.
  __syncthreads();
  return segment_decay;
}

// Whether the type of a kernel's parameters says if sequences are packed: where ptxas 13.0, with a predicate of it alive
// through the loop over chunks, took another value for it (docs/tuning.md).
template <typename Scalar, int dstate, bool states_only>
constexpr bool kKnowsWhetherPacked = kIsFp32<Scalar> && dstate <= 64 && !states_only;

template <typename Scalar, int dstate, bool states_only, typename Params>
__global__ void __launch_bounds__(kWarpgroups* kWarpgroupThreads, 1)
    ssd_fwd_sm80_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char memory[];
  static_assert(kKnowsWhetherPacked<Scalar, dstate, states_only> != std::is_same_v<Params, SsdFwdParams>,
                "PackedFwdParams or UnpackedFwdParams if and only if the kernel is compiled for one of them");
  take_ticket<states_only>(schedule);
  __syncthreads();
  const int index = threadIdx.x / kWarpgroupThreads;
  const FragmentLane lane;
  using Layout = WarpgroupLayout<dstate>;
  scan_segments<states_only, Layout::kColumns>(
      p, schedule, index, lane, [&](State<Layout::kColumns>& state, const WorkSpan& at, const StateTile& state_tile) {
        return scan_segment_sm80<Scalar, dstate, states_only>(p, schedule, memory, at, state_tile, index, lane, state);
      });
}

}  // namespace ssm_kernels::ssd
