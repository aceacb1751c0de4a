// SSD forward with wgmma, for fp16 and bf16 on compute capability 9.0a (cuda/ptx/wgmma_sm90.cuh). See fwd.cuh for what is
// computed.
//
// A block has two consumer warpgroups and one producer warpgroup. Two producer warps copy the chunks ahead to shared memory.
// The other two compute the tables of decays (chunk_cumsum), one for each consumer warpgroup (cuda/pipeline.cuh). A consumer
// warpgroup keeps its state tile S in registers from chunk to chunk (state.cuh); scan_segments (state_carry.cuh) loads it
// before a segment and passes it to the next block. The warpgroup overlaps its products with other work: while S C^T runs, it
// applies decays and gains to B C^T (bmm_chunk); while S is updated (chunk_state), it rounds out (epilogue.cuh).
//
// Products sum over steps along the rows of B, x and M^T. In these tiles the steps come from both ends of the chunk in turn
// (FromBothEnds), so that all warps have equally much of M^T to scale. Values from shared memory that are needed while a
// product runs are loaded before it starts: later loads would wait for the product. out leaves through shared memory by TMA
// stores of whole tiles, each while the next chunk is processed.
//
// Products read registers that were written before any product in flight started. Otherwise the compiler waits for those in
// flight: where it cannot tell that they do not use the registers, and before branches that it takes for divergent.
#pragma once

#include "cuda/chunked/decay_mask.cuh"
#include "cuda/chunked/epilogue.cuh"
#include "cuda/chunked/state_carry.cuh"
#include "cuda/chunked/warpgroup_layout.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "ssd/cuda/row_rotator.cuh"
#include "ssd/cuda/skip_and_gate.cuh"

namespace ssm_kernels::ssd {

template <int dstate, typename Gates>
struct Sm90Shared {
  using Tables = TablesOfGates<Gates>;
  using Layout = WarpgroupLayout<dstate>;
  static constexpr int kMaxStages = 3;
  struct CopiedRows {
    SmemTile<Layout::kColumns> B[Layout::kColumnBlocks], C[Layout::kColumnBlocks];
  };
  struct Stage : std::conditional_t<kRotatesRows<Gates>, Empty, CopiedRows> {
    SmemTile<kStateRows> x[Layout::kRowBlocks];
  };
  struct {
    SmemTile<kChunk> rounded, lo;
  } bmm[kWarpgroups];  // M^T
  SmemTile<kStateRows> out[Layout::kRowBlocks];
  std::conditional_t<kRotatesRows<Gates>, RotatedShared<dstate>, Empty> rotated;
  typename Layout::PartialOut partial_out;
  Tables tables[kMaxStages][kWarpgroups];
  Mbarrier full[kMaxStages], empty[kMaxStages];

  static SSM_HOST_DEVICE constexpr int align(int bytes) {
    return (bytes + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment;
  }
  static SSM_HOST_DEVICE constexpr int stage_bytes(bool has_gate) {
    return static_cast<int>(sizeof(Stage) + (has_gate ? sizeof(Stage::x) : 0));
  }
  static SSM_HOST_DEVICE constexpr int bytes(int stages, bool has_gate) {
    return kOperandAlignment + align(static_cast<int>(sizeof(Sm90Shared))) + stages * stage_bytes(has_gate);
  }
};

template <typename Scalar, int dstate, bool has_options, typename Gates>
struct FwdSm90 {
  using Params = typename Gates::FwdParams;
  // Warps 0 and 1 of the producer warpgroup copy; warps 2 and 3 compute the tables of a state tile each.
  static constexpr bool kRotates = kRotatesRows<Gates>;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads, kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kCopyWarps = 2, kCopyThreads = kCopyWarps * kWarpSize;
  static_assert(kCopyWarps + kWarpgroups == kWarpgroupWarps, "setmaxnreg takes a whole warpgroup of producers");

  using Shared = Sm90Shared<dstate, Gates>;
  using Tables = typename Shared::Tables;
  using Stage = typename Shared::Stage;
  using Layout = WarpgroupLayout<dstate>;
  using TileState = State<Layout::kColumns>;
  static constexpr int kStateGroups = Layout::kColumns / 16;
  using Order = FromBothEnds;  // of the steps, down the rows of B, x and M^T
  using Epilogue = TmaEpilogue<Scalar, Order, SkipAndGate, Params>;
  using RotatedRows = std::conditional_t<kRotates, ssd::RotatedRows<dstate>, NoRotatedRows>;
  static constexpr int kConsumerRegisters =
      dstate > 64 ? (kRotates ? 200 : 208) : (kRotates ? 176 : 192);  // of a thread, after setmaxnreg
  static constexpr int kProducerRegisters = cuda::producer_registers<kConsumerThreads, kConsumerRegisters, kWarpgroupThreads>();

  const Params& p;
  const Schedule& schedule;
  Shared& shared;
  unsigned char* stages;
  bool has_gate;

  __device__ __forceinline__ FwdSm90(const Params& p, const Schedule& schedule, unsigned char* memory)
      : p(p),
        schedule(schedule),
        shared(*reinterpret_cast<Shared*>(memory)),
        stages(memory + Shared::align(sizeof(Shared))),
        has_gate(p.z.data != nullptr) {}

  __device__ __forceinline__ Stage& stage(int stage_index) const {
    return *reinterpret_cast<Stage*>(stages + stage_index * Shared::stage_bytes(has_gate));
  }
  __device__ __forceinline__ SmemTile<kStateRows>* z_tile(int stage_index, int state_tile) const {
    return reinterpret_cast<SmemTile<kStateRows>*>(&stage(stage_index) + 1) + state_tile;
  }

  // Run by the producer warpgroup.
  __device__ __forceinline__ void produce() {
    const int warp = threadIdx.x / kWarpSize - kWarpgroups * kWarpgroupWarps;
    PipelineState pipeline;
    for_each_segment(p, schedule, [&](const auto&, const WorkSpan& at) {
      if (warp < kCopyWarps) {
        copy(at, pipeline);
      } else {
        produce_cumsum(at, warp - kCopyWarps, pipeline);
      }
    });
  }

  // The producer warpgroup of a kernel that rotates: all its warps rotate. Before that, for each stage, warps 0 and 1 compute
  // the tables of a head each, and warp 2 starts the copies of x and z.
  __device__ __forceinline__ void produce_rotated() {
    RowRotator<Gates, dstate, Order> rotator(p, shared.rotated);
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize - kWarpgroups * kWarpgroupWarps, 0);
    PipelineState pipeline;
    for_each_segment(p, schedule, [&](const auto&, const WorkSpan& at) {
      const StateTile first(p, schedule, at, 0), second(p, schedule, at, 1);
      const bool makes_tables = warp < kWarpgroups;
      const int head = warp == 0 ? first.head : second.head;
      const Gates gates(p, head);
      const auto source = Gates::source(p, at, head, 0);
      FetchedSteps<Gates> fetched = {};
      const auto fetch = [&](int chunk) {
        if (makes_tables && chunk < at.chunks) fetched.fetch(p, Gates::later(p, source, chunk), nullptr, at.steps_of(chunk));
      };
      fetch(0);
      int filled = 0;
      rotator.rotate_segment(at, first.head, second.head, [&](int chunk) {
#pragma unroll 1
        while (filled < at.chunks) {
          Mbarrier& empty = shared.empty[pipeline.stage];
          if (filled > chunk && pipeline.phase > 0 && !__all_sync(kAllLanes, empty.is_complete(pipeline.phase - 1))) break;
          if (pipeline.phase > 0) empty.wait(pipeline.phase - 1);
          Mbarrier& full = shared.full[pipeline.stage];
          if (makes_tables) {
            ChunkCumsum<1, Gates> made;
            made.make(p, gates, &fetched);
            made.store(0, shared.tables[pipeline.stage][warp]);
            full.arrive();
            fetch(filled + 1);
          } else if (threadIdx.x % kWarpgroupThreads == kWarpgroups * kWarpSize) {
            load_tiles(at, first, second, filled, pipeline.stage, full);
          }
          ++filled;
          pipeline.advance(schedule.stages);
        }
      });
    });
  }

  // Starts the copies of a chunk of x and z, by TMA: elements outside of the tensors become zeros.
  __device__ __forceinline__ void load_tiles(const WorkSpan& at, const StateTile& first, const StateTile& second, int chunk,
                                             int stage_index, Mbarrier& full) {
    static_assert(kRotatedTileSteps == kBlockSteps, "a copy fills one block of the order");
    Stage& target = stage(stage_index);
    const int step = static_cast<int>(at.start) + chunk * kChunk, batch = static_cast<int>(at.batch);
    full.arrive_and_expect_tx(static_cast<int>(has_gate ? 2 * sizeof(target.x) : sizeof(target.x)));
#pragma unroll
    for (int index = 0; index < Layout::kRowBlocks; ++index) {
      const int row = index == 0 ? first.first_row : second.first_row, head = index == 0 ? first.head : second.head;
#pragma unroll
      for (int position = 0; position < kStepBlocks; ++position) {
        cuda::tma_load_tile(target.x[index].vector(kBlockSteps * position, 0), p.x_descriptor, row, head,
                            step + kBlockSteps * Order::block_at(position), batch, full);
      }
      if (has_gate) cuda::tma_load_tile(z_tile(stage_index, index), p.z_descriptor, row, head, step, batch, full);
    }
  }

  __device__ __forceinline__ void produce_cumsum(const WorkSpan& at, int index, PipelineState& pipeline) {
    const StateTile state_tile(p, schedule, at, index);
    produce_chunk_cumsum<Gates, 1, false>(
        p, at, state_tile.head, WarpShare<1>(), schedule.stages, pipeline, shared.full, shared.empty,
        [](int chunk) { return chunk; }, [&](int stage) -> Tables& { return shared.tables[stage][index]; });
  }

  __device__ __forceinline__ void copy(const WorkSpan& at, PipelineState& pipeline) {
    // Opaque: the compiler recomputes what follows from it for each segment.
    const int thread = cuda::opaque(static_cast<int>(threadIdx.x) - kConsumerThreads);
    const auto group_copier = [&](const RowsView& view, int block, auto order) {
      const int first = block * Layout::kColumns;
      return RowCopier<Scalar, Layout::kColumns, kCopyThreads, decltype(order)>(
          at.template rows<Scalar>(view, at.group, 0) + first, view.stride_step, p.dstate - first, thread);
    };
    const auto tile_copier = [&](const RowsView& view, int index, auto order) {
      const StateTile state_tile(p, schedule, at, index);
      return RowCopier<Scalar, kStateRows, kCopyThreads, decltype(order)>(
          at.template rows<Scalar>(view, state_tile.head, 0) + state_tile.first_row, view.stride_step, state_tile.rows, thread);
    };
    const RowsView& z = has_gate ? p.z : p.x;
    using CopierOfB = RowCopier<Scalar, Layout::kColumns, kCopyThreads, Order>;
    using CopierOfC = RowCopier<Scalar, Layout::kColumns, kCopyThreads>;
    CopierOfB copy_B[kWarpgroups] = {group_copier(p.B, 0, Order()), group_copier(p.B, 1, Order())};
    RowCopier<Scalar, kStateRows, kCopyThreads, Order> copy_x[kWarpgroups] = {tile_copier(p.x, 0, Order()),
                                                                              tile_copier(p.x, 1, Order())};
    CopierOfC copy_C[kWarpgroups] = {group_copier(p.C, 0, InOrder()), group_copier(p.C, 1, InOrder())};
    RowCopier<Scalar, kStateRows, kCopyThreads> copy_z[kWarpgroups] = {tile_copier(z, 0, InOrder()),
                                                                       tile_copier(z, 1, InOrder())};
    cuda::produce_copies<Shared::kMaxStages - 2>(at.chunks, schedule.stages, pipeline, shared.full, shared.empty,
                                                 [&](int chunk, int stage_index) {
                                                   Stage& target = stage(stage_index);
                                                   const int steps = at.steps_of(chunk);
#pragma unroll
                                                   for (int index = 0; index < Layout::kColumnBlocks; ++index) {
                                                     copy_B[index].copy(target.B[index], steps, p.B.stride_step);
                                                     copy_C[index].copy(target.C[index], steps, p.C.stride_step);
                                                   }
#pragma unroll
                                                   for (int index = 0; index < Layout::kRowBlocks; ++index) {
                                                     copy_x[index].copy(target.x[index], steps, p.x.stride_step);
                                                     if (has_gate)
                                                       copy_z[index].copy(*z_tile(stage_index, index), steps, p.z.stride_step);
                                                   }
                                                 });
  }

  // Run by a consumer warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const FragmentLane lane = FragmentLane::opaque_thread();
    clear_left_of_diagonal<Order>(shared.bmm[index].rounded, lane);
    clear_left_of_diagonal<Order>(shared.bmm[index].lo, lane);
    const FragmentPairs<> pairs(lane);
    PipelineState pipeline;
    RotatedRows rotated(shared.rotated, index);
    scan_segments<Layout::kColumns, ScalarMap>(
        p, schedule, index, lane,
        [&](TileState& state, const WorkSpan& at, const StateTile& state_tile, const auto& store_chunk_state) {
          scan_segment(state, at, state_tile, index, pairs, lane, pipeline, rotated, store_chunk_state);
        });
    Epilogue::wait_for_sent();
  }

  // Takes the state through the segment. A chunk state is stored after the chunk's stage is released.
  template <typename StoreChunkState>
  __device__ __forceinline__ void scan_segment(TileState& state, const WorkSpan& at, const StateTile& state_tile, int index,
                                               const FragmentPairs<>& pairs, const FragmentLane& lane, PipelineState& pipeline,
                                               RotatedRows& rotated, const StoreChunkState& store_chunk_state) {
    // The epilogue stores nothing for a state tile without rows.
    StateTile out_tile = state_tile;
    if (!Layout::writes_out(index)) out_tile.rows = 0;
    Epilogue out(p, at, out_tile, lane);
    const int rows = Layout::row_block(index), columns = Layout::column_block(index);
#pragma unroll 1
    for (int left = at.chunks; left > 0; --left) {
      shared.full[pipeline.stage].wait(pipeline.phase);
      Stage& tiles = stage(pipeline.stage);
      const Tables& tables = shared.tables[pipeline.stage][index];
      uint64_t B_rows, C_rows;
      if constexpr (kRotates) {
        rotated.wait();
        B_rows = make_operand(rotated.slot().k);
        C_rows = make_operand(rotated.slot().q);
      } else {
        B_rows = make_operand(tiles.B[columns]);
        C_rows = make_operand(tiles.C[columns]);
      }

      float y[kStepBlocks][4];
      float m[kStepBlocks][4];
      uint32_t s[kStateGroups][4];
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
      // Loads most of what scaling needs of the tables: loads after the products start would wait for them.
      const DecayMask<Order, has_options, Tables> mask(tables, lane, kRotates ? 0 : rank_shift_of<Gates>(p));
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::gemm<Scalar, false, false>(m, columns_of(B_rows, k), columns_of(C_rows, k), k > 0);
      }
      if constexpr (kRotates) {
        const uint64_t k_lo = make_operand(rotated.slot().lo.k), q_lo = make_operand(rotated.slot().lo.q);
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) {
          cuda::gemm<Scalar, false, false>(m, columns_of(B_rows, k), columns_of(q_lo, k), true);
          cuda::gemm<Scalar, false, false>(m, columns_of(k_lo, k), columns_of(C_rows, k), true);
        }
      }
      cuda::warpgroup_commit();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) cuda::gemm<Scalar, false>(y, s[k], columns_of(C_rows, k), k > 0);
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<1>(m);
      // All warps have read the previous chunk's M^T and have written its out.
      sync_warpgroup(index);
      if (left < at.chunks) out.send(shared.out[rows], at.chunks - left - 1);
      const FragmentPairs<> opaque_pairs = pairs.opaque();
      auto& bmm = shared.bmm[index];
      mask.apply(m, [&](float low, float high, int n, int half) {
        const uint32_t rounded = cuda::pack<Scalar>(low, high);
        opaque_pairs.at(bmm.rounded, n, half) = rounded;
        opaque_pairs.at(bmm.lo, n, half) = cuda::pack_lo<Scalar>(low, high, rounded);
      });
      cuda::fence_proxy_async();

      uint32_t x[kStepGroups][4], scaled[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::ldmatrix_transposed(x[j], tiles.x[rows].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
        scale_inputs<Scalar, Order>(x[j], tables.gain_to_chunk_end, j, lane, scaled[j]);
      }

      cuda::warpgroup_wait<0>(y);
      scale_by_exp_cumsum(y, tables, lane);
      out.wait_for_sent();
      sync_warpgroup(index);
      cuda::warpgroup_arrive();
      const uint64_t m_rows = make_operand(shared.bmm[index].rounded), lo_rows = make_operand(shared.bmm[index].lo);
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, true>(y, x[j], rows_of(m_rows, j), true);
        cuda::gemm<Scalar, true>(y, x[j], rows_of(lo_rows, j), true);
      }
      cuda::warpgroup_commit();

      state.decay(tables.chunk_decay);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, true>(state.values, scaled[j], rows_of(B_rows, j), j > 0 || !(has_options && has_reset(p, tables)));
      }
      cuda::warpgroup_commit();

      cuda::warpgroup_wait<1>(y);
      const auto write_out = [&] {
        out.write(y, x, has_gate ? z_tile(pipeline.stage, rows) : nullptr, shared.out[rows], lane);
      };
      if constexpr (!Layout::kShareRows) {
        write_out();
      } else if (Layout::writes_out(index)) {
        shared.partial_out.add_to(y);
        write_out();
      } else {
        shared.partial_out.put(y);
      }
      cuda::warpgroup_wait<0>(state.values);
      shared.empty[pipeline.stage].arrive();
      pipeline.advance(schedule.stages);
      if constexpr (kRotates) rotated.release();
      if constexpr (has_options) store_chunk_state(left - 1);
      if constexpr (Layout::kShareRows) {
        if (!Layout::writes_out(index)) shared.partial_out.wait_until_read();
      }
    }
    sync_warpgroup(index);
    out.send_last(shared.out[rows]);
  }
};

// has_options: whether p.resets and p.chunk_states may be given. Without them the loop over chunks has no code for either: code
// to store chunk states slows the loop even where it is skipped.
template <typename Scalar, int dstate, bool has_options, typename Gates>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? FwdSm90<Scalar, dstate, has_options, Gates>::kThreads : kWarpSize, 1)
    ssd_fwd_sm90_kernel(const __grid_constant__ typename Gates::FwdParams p, const __grid_constant__ Schedule schedule) {
#if SSM_KERNELS_HAS_WGMMA
  using Fwd = FwdSm90<Scalar, dstate, has_options, Gates>;
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename Fwd::Shared>(unaligned_memory);
  Fwd fwd(p, schedule, reinterpret_cast<unsigned char*>(&shared));

  // The shuffle tells the compiler that all lanes have the same value.
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
  if (threadIdx.x < schedule.stages) {
    fwd.shared.full[threadIdx.x].init((Fwd::kRotates ? 1 : Fwd::kCopyThreads) + kWarpgroups * kWarpSize);
    fwd.shared.empty[threadIdx.x].init(Fwd::kConsumerThreads);
  }
  if constexpr (Fwd::kRotates) fwd.shared.rotated.init(threadIdx.x);
  take_range(schedule);
  __syncthreads();
  if (warpgroup >= kWarpgroups) {
    cuda::warpgroup_reg_dealloc<Fwd::kProducerRegisters>();
    if constexpr (Fwd::kRotates) {
      fwd.produce_rotated();
    } else {
      fwd.produce();
    }
  } else {
    cuda::warpgroup_reg_alloc<Fwd::kConsumerRegisters>();
    fwd.consume(warpgroup);
  }
#endif
}

}  // namespace ssm_kernels::ssd
