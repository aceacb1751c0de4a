// SSD forward with mma.sync (cuda/warp_mma.cuh): for fp32 on every device, and for fp16 and bf16 on devices without wgmma and
// in reverse scans. See fwd.cuh for what is computed.
//
// A block has its two consumer warpgroups and no other warps. Warp w of a warpgroup computes rows 16 w to 16 w + 15 of M^T; the
// warps exchange these rows through shared memory. Every warp copies its share of the chunks ahead. After every fourth chunk
// each warp computes its warpgroup's tables of one of the next four (chunk_cumsum): the others would only wait for it. out
// leaves through the tile of x.
//
// fp32 takes twice the memory. If M^T fits into the tile of C, it replaces C there after all warps have read C. out then leaves
// through the tile of M^T, before the state is updated (chunk_state).
#pragma once

#include "cuda/chunked/decay_mask.cuh"
#include "cuda/chunked/epilogue.cuh"
#include "cuda/chunked/state_carry.cuh"
#include "cuda/chunked/warpgroup_layout.cuh"
#include "ssd/cuda/skip_and_gate.cuh"

namespace ssm_kernels::ssd {

template <typename Scalar, int dstate, typename Gates>
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
    TablesOfGates<Gates> tables[kWarpgroupWarps];            // of four chunks, one by each warp
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

// Takes the state through a segment. scan_segment() copies the chunks ahead and computes their tables; scan_chunk_half() and
// scan_chunk_tf32() process one chunk.
template <typename Scalar, int dstate, typename Mma, typename Gates>
struct FwdSm80 {
  using Params = typename Gates::FwdParams;
  using Epilogue = RegisterEpilogue<Scalar, SkipAndGate, Params>;
  using Shared = Sm80Shared<Scalar, dstate, Gates>;
  using Stage = typename Shared::Stage;
  using Layout = WarpgroupLayout<dstate>;
  using TileState = State<Layout::kColumns>;
  using HeadTile = typename Shared::HeadTile;
  using GroupTile = typename Shared::GroupTile;
  using Tables = TablesOfGates<Gates>;
  using Pairs = FragmentPairs<sizeof(Scalar)>;
  using Operand = cuda::WarpOperand<sizeof(Scalar), Mma::kIsRounded>;
  static constexpr int kStateGroups = Layout::kColumns / 16, kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kThreadsOfRows = kThreads / Layout::kRowBlocks;

  const Params& p;
  const Schedule& schedule;
  unsigned char* memory;
  const WorkSpan& at;
  const StateTile& state_tile;
  const int index;
  const FragmentLane& thread_lane;

  template <typename StoreChunkState>
  __device__ __forceinline__ void scan_segment(TileState& state, const StoreChunkState& store_chunk_state) const {
    const Gates gates(p, state_tile.head);
    FetchedSteps<Gates> fetched;
    const auto fetch = [&](int chunk) {
      if (chunk >= at.chunks) return;
      fetched.fetch(p, Gates::source(p, at, state_tile.head, chunk), at.resets(p, chunk), at.steps_of(chunk));
    };
    const auto chunk_cumsum = [&](int chunk) {
      if (chunk >= at.chunks) return;
      ChunkCumsum<1, Gates> made;
      made.make(p, gates, &fetched);
      made.store(0, tables_of(index, chunk));
    };

    const int prefetched = schedule.stages - 1;
    for (int chunk = 0; chunk < prefetched; ++chunk) copy(chunk);
    fetch(thread_lane.warp);
    chunk_cumsum(thread_lane.warp);

    Epilogue out(p, at, state_tile, thread_lane);
    if constexpr (!kIsFp32<Scalar>) clear_left_of_diagonal<InOrder>(shared().per_warpgroup[index].bmm, thread_lane);
#pragma unroll 1
    for (int chunk = 0; chunk < at.chunks; ++chunk) {
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
      // Each warp fetches the steps of one of the next four chunks.
      constexpr int kFetchedAhead = 2;
      const int position = chunk % kWarpgroupWarps;
      if (position == kWarpgroupWarps - kFetchedAhead) fetch(chunk + kFetchedAhead + thread_lane.warp);
      if constexpr (kIsFp32<Scalar>) {
        scan_chunk_tf32(chunk, state, out);
      } else {
        scan_chunk_half(chunk, state, out);
      }
      store_chunk_state(at.chunks - chunk - 1);
      if (position == kWarpgroupWarps - 1) {
        sync_warpgroup(index);  // all warps have read the tables
        chunk_cumsum(chunk + 1 + thread_lane.warp);
      }
    }
    // The next segment's copies overwrite this one's shared memory.
    __syncthreads();
  }

 private:
  __device__ __forceinline__ Shared& shared() const { return *reinterpret_cast<Shared*>(memory); }
  __device__ __forceinline__ Stage& stage_of(int chunk) const {
    return *reinterpret_cast<Stage*>(memory + sizeof(Shared) + chunk % schedule.stages * Shared::stage_bytes(has_gate()));
  }
  __device__ __forceinline__ Tables& tables_of(int warpgroup, int chunk) const {
    return shared().per_warpgroup[warpgroup].tables[chunk % kWarpgroupWarps];
  }
  __device__ __forceinline__ bool has_gate() const { return p.z.data != nullptr; }
  __device__ __forceinline__ HeadTile* z_of(int chunk) const {
    return has_gate() ? reinterpret_cast<HeadTile*>(&stage_of(chunk) + 1) + Layout::row_block(index) : nullptr;
  }
  template <typename AnyTile>
  static __device__ __forceinline__ auto describe(AnyTile& tile, const FragmentLane& lane) {
    return cuda::make_warp_operand<sizeof(Scalar), Mma::kIsRounded>(&tile, AnyTile::kPanelBytes, lane.index);
  }

  // Starts the block's copies of a chunk, if the segment has it, and commits a group.
  __device__ __forceinline__ void copy(int chunk) const {
    if (chunk < at.chunks) {
      const int steps = at.steps_of(chunk);
      Stage& target = stage_of(chunk);
      int thread = threadIdx.x;
      if constexpr (kIsFp32<Scalar>) thread = cuda::opaque(thread);
      const auto copy_group_rows = [&](GroupTile(&tiles)[Layout::kColumnBlocks], const RowsView& view) {
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
      copy_group_rows(target.B, p.B);
      copy_group_rows(target.C, p.C);
      copy_head_rows(target.x[Layout::row_block(index)], p.x);
      if (has_gate()) copy_head_rows(*z_of(chunk), p.z);
    }
    cuda::cp_async_commit();
  }

  // The intra-chunk part of chunk_scan: y^T += x^T M^T, with M^T in `tile`.
  template <int unrolled>
  __device__ __forceinline__ void add_intra_chunk(float (&y)[kStepBlocks][4], typename Shared::PairTile& tile, HeadTile& x_tile,
                                                  const FragmentLane& lane) const {
    const auto M = describe(tile, lane);
#pragma unroll unrolled
    for (int j = 0; j < kStepGroups; ++j) {
      cuda::OperandA<Scalar> x;
      load_inputs(x, x_tile, j, lane);
      cuda::gemm<Scalar, true>(y, x, rows_of(M, j), true, /*first_block=*/2 * j);
    }
  }

  // Writes out through `tile`. If two warpgroups have half of the columns each, the first adds the second's part of y.
  __device__ __forceinline__ void write_out(int chunk, float (&y)[kStepBlocks][4], HeadTile& x_tile, HeadTile& tile,
                                            const FragmentLane& lane, Epilogue& out) const {
    if constexpr (Layout::kShareRows) {
      auto& partial_out = shared().partial_out;
      if (!Layout::writes_out(index)) {
        partial_out.put(y);
        partial_out.wait_until_read();
        return;
      }
      partial_out.add_to(y);
    }
    cuda::OperandA<Scalar> x[kStepGroups];
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) load_inputs(x[j], x_tile, j, lane);
    out.write(y, x, z_of(chunk), tile, lane, at.steps_of(chunk));
  }

  // fp16 and bf16. M^T is a hi/lo split, whose two parts go through one tile in turn: there may be no room for another.
  __device__ __forceinline__ void scan_chunk_half(int chunk, TileState& state, Epilogue& out) const {
    const FragmentLane& lane = thread_lane;
    Stage& tiles = stage_of(chunk);
    auto& x_tile = tiles.x[Layout::row_block(index)];
    auto& bmm = shared().per_warpgroup[index].bmm;
    const Tables& tables = tables_of(index, chunk);
    const Pairs pairs(lane);
    const auto B = describe(tiles.B[Layout::column_block(index)], lane),
               C = describe(tiles.C[Layout::column_block(index)], lane);

    // Two passes over C: its products with B and with the state at once would take too many registers.
    float y[kStepBlocks][4] = {};
#pragma unroll
    for (int k = 0; k < kStateGroups; ++k) {
      cuda::OperandA<Scalar> s;
      state.template pack<Scalar>(k, s);
      cuda::gemm<Scalar, false>(y, s, columns_of(C, k), true);
    }
    scale_by_exp_cumsum(y, tables, lane);
    float m[kStepBlocks][4] = {};
#pragma unroll
    for (int k = 0; k < kStateGroups; ++k) cuda::gemm<Scalar, false, false>(m, columns_of(B, k), columns_of(C, k), true);
    cuda::Packed<Scalar> lo[kStepBlocks][2] = {};
    DecayMask<InOrder, true, Tables>(tables, lane, rank_shift_of<Gates>(p))
        .apply(m, [&](float low, float high, int n, int half) {
          const cuda::Packed<Scalar> packed = cuda::pack<Scalar>(low, high);
          pairs.at(bmm, n, half) = packed;
          lo[n][half] = cuda::pack_lo<Scalar>(low, high, packed);
        });

    if (has_reset(p, tables)) {
      state.clear();
    } else {
      state.decay(tables.chunk_decay);
    }
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) {
      cuda::OperandA<Scalar> x, scaled;
      load_inputs(x, x_tile, j, lane);
      scale_inputs<Scalar>(x, tables.gain_to_chunk_end, j, lane, scaled);
      cuda::gemm<Scalar, true>(state.values, scaled, rows_of(B, j), true);
    }

    sync_warpgroup(index);
#pragma unroll 1
    for (int term = 0; term < 2; ++term) {
      if (term > 0) {
        sync_warpgroup(index);
#pragma unroll
        for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) pairs.at(bmm, n, half) = lo[n][half];
        }
        sync_warpgroup(index);
      }
      add_intra_chunk<kStepGroups>(y, bmm, x_tile, lane);
    }
    // Through the tile of x, of which a warp reads only the columns that it writes.
    write_out(chunk, y, x_tile, x_tile, lane, out);
  }

  // fp32, as 3xTF32, or as TF32 if the policy rounds. Registers are few: the lane is opaque, so that each part of the work
  // recomputes its addresses. Loops are not unrolled; by two was not faster. With more than 64 columns of state out is written
  // before the state is updated.
  __device__ __forceinline__ void scan_chunk_tf32(int chunk, TileState& state, Epilogue& out) const {
    const FragmentLane lane = thread_lane.opaque();
    Stage& tiles = stage_of(chunk);
    auto& x_tile = tiles.x[Layout::row_block(index)];
    const Tables& tables = tables_of(index, chunk);
    const auto B = describe(tiles.B[Layout::column_block(index)], lane),
               C = describe(tiles.C[Layout::column_block(index)], lane);

    if (tables.starts_with_reset) state.clear();
    float y[kStepBlocks][4] = {};
    // A loop that rotates the state's registers: when it is unrolled, ptxas serializes the whole chain of mma instructions.
    constexpr int kPanels = GroupTile::kPanels, kGroups = kStateGroups / kPanels;
#pragma unroll 1
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
    store_bmm(chunk, tiles, B, C, lane);

    typename Shared::PairTile& bmm = shared().bmm(index, tiles);
    const auto chunk_state = [&] { add_chunk_state(tiles, x_tile, tables, B, state); };
    const auto chunk_scan = [&] {
      const FragmentLane lane = thread_lane.opaque();
      if constexpr (Shared::kSharesBmm) {
        __syncthreads();
      } else {
        sync_warpgroup(index);
      }
      add_intra_chunk<1>(y, bmm, x_tile, lane);
      if constexpr (Shared::kIsInPlaceOfC) {
        // x is read again by chunk_state: out goes where M^T was.
        sync_warpgroup(index);
        write_out(chunk, y, x_tile, bmm, lane, out);
      } else {
        write_out(chunk, y, x_tile, x_tile, lane, out);
      }
    };
    static_assert(Shared::kIsInPlaceOfC == (dstate > 64), "C is large enough for M^T where out has to be written first");
    if constexpr (Shared::kIsInPlaceOfC) {
      chunk_scan();
      chunk_state();
    } else {
      chunk_state();
      chunk_scan();
    }
  }

  // Stores M^T. State tiles of different rows have the same (B C^T)^T (bmm_chunk): each warpgroup computes half of its columns,
  // for both.
  __device__ __forceinline__ void store_bmm(int chunk, Stage& tiles, const Operand& B, const Operand& C,
                                            const FragmentLane& lane) const {
    constexpr int kBlocks = Shared::kSharesBmm ? kStepBlocks / kWarpgroups : kStepBlocks;
    const int first_block = Shared::kSharesBmm ? kBlocks * index : 0;
    const Pairs pairs(lane);
    float m[kBlocks][4] = {};
#pragma unroll 1
    for (int k = 0; k < kStateGroups; ++k) {
      cuda::gemm<Scalar, false, false>(m, columns_of(B, k), columns_of(rows_of(C, first_block / 2), k), true);
    }
    if constexpr (Shared::kIsInPlaceOfC) __syncthreads();  // other warps still read C
    const auto apply_mask = [&](int warpgroup) {
      const FragmentLane mask_lane = lane.opaque();
      auto& target = shared().bmm(warpgroup, tiles);
      DecayMask<InOrder, true, Tables, kBlocks>(tables_of(warpgroup, chunk), mask_lane, rank_shift_of<Gates>(p), first_block)
          .apply(m, [&](float low, float high, int n, int half) { pairs.at(target, n, half) = cuda::pack<Scalar>(low, high); });
      // This block is left of the diagonal, but the product reads it.
      if (2 * lane.warp / kBlocks * kBlocks == first_block) pairs.at(target, 2 * lane.warp, 1) = {0, 0};
    };
    if constexpr (Shared::kSharesBmm) {
#pragma unroll
      for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) apply_mask(warpgroup);
    } else {
      apply_mask(index);
    }
  }

  // chunk_state and state_passing: decays the state over the chunk and adds the scaled products of x and B.
  __device__ __forceinline__ void add_chunk_state(Stage& tiles, HeadTile& x_tile, const Tables& tables, const Operand& B,
                                                  TileState& state) const {
    const FragmentLane lane = thread_lane.opaque();
    int first = 0;  // the first step that adds to the state
    if (has_reset(p, tables)) {
      state.clear();
      // Rows of B before the last reset become zeros: they may hold NaN, which a product with zero would let through.
      first = tables.first[kChunk - 1];
      __syncthreads();
      for (GroupTile& tile : tiles.B) {
#pragma unroll 1
        for (int i = threadIdx.x; i < first * GroupTile::kVectors; i += kThreads) {
          *tile.vector(i / GroupTile::kVectors, i % GroupTile::kVectors) = {0, 0, 0, 0};
        }
      }
      __syncthreads();
    } else {
      state.decay(tables.chunk_decay);
    }
#pragma unroll 1
    for (int j = 0; j < kStepGroups; ++j) {
      cuda::OperandA<Scalar> x, scaled;
      load_inputs(x, x_tile, j, lane);
      scale_inputs<Scalar>(x, tables.gain_to_chunk_end, j, lane, scaled, first);
      cuda::gemm<Scalar, true>(state.values, scaled, rows_of(B, j), true);
    }
  }
};

// Whether the type of a kernel's parameters says if sequences are packed. With a predicate of it alive through the loop over
// chunks, ptxas 13.0 used another value for it (docs/tuning/ssd_chunk_scan.md).
template <typename Scalar, int dstate>
constexpr bool kKnowsWhetherPacked = kIsFp32<Scalar> && dstate <= 64;

template <typename Scalar, int dstate, typename Params, typename Mma, typename Gates>
__global__ void __launch_bounds__(kWarpgroups* kWarpgroupThreads, 1)
    ssd_fwd_sm80_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char memory[];
  static_assert(kKnowsWhetherPacked<Scalar, dstate> != std::is_same_v<Params, typename Gates::FwdParams>,
                "Packed or Unpacked if and only if the kernel is compiled for one of them");
  take_range(schedule);
  __syncthreads();
  const int index = threadIdx.x / kWarpgroupThreads;
  const FragmentLane lane;
  using Fwd = FwdSm80<Scalar, dstate, Mma, Gates>;
  scan_segments<Fwd::Layout::kColumns, ScalarMap>(
      p, schedule, index, lane,
      [&](typename Fwd::TileState& state, const WorkSpan& at, const StateTile& state_tile, const auto& store_chunk_state) {
        Fwd{p, schedule, memory, at, state_tile, index, lane}.scan_segment(state, store_chunk_state);
      });
}

}  // namespace ssm_kernels::ssd
