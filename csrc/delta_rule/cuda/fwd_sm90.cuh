// The delta rule's forward with wgmma, for fp16 and bf16 on compute capability 9.0a. With the decay a and the writing strength
// beta of a value head, key k, query q and value v of a step, S is V x K:
//
//   S_t = a_t S_{t-1} + beta_t (v_t - a_t S_{t-1} k_t) k_t^T        o_t = scale S_t q_t
//
// Within a chunk of kChunk steps everything is a matrix product. s is the cumulative sum of log a from the chunk's start, l the
// chunk's last step, S the state before the chunk, G(i, j) = e^(s_i - s_j) for j <= i, else 0:
//
//   A = strictly lower part of diag(beta) (K K^T G)        M = (I + A)^-1 diag(beta)        P = scale (Q K^T G)
//   R^T = V^T - (S K^T) e^(s_i)                            what the state predicts wrongly
//   U^T = R^T M^T                                          what each step adds, after the additions of the steps before it
//   O^T = scale (S Q^T) e^(s_i) + U^T P^T
//   S'  = e^(s_l) S + (U_j e^(s_l - s_j))^T K
//
// With several updates a step (has_updates) k, v and beta have a row for each update, which kernels count as steps. q and out
// have fewer rows, and so have P, S Q^T and O^T (step_tiles.cuh).
//
// A kernel before this one computes M (chunk_matrices_sm90.cuh): an inverse takes longer than the rest of a chunk.
//
// A block has two consumer warpgroups, a matrix warpgroup and a producer warpgroup. A consumer warpgroup holds 64 rows of V and
// up to 128 columns of S as accumulators. No value of the chain S, R, U, S leaves its registers: each is the operand A of the
// next product, and K, M and P are operands B in shared memory. S Q^T is multiplied with S K^T. The matrix warpgroup works up
// to two chunks ahead: it multiplies Q K^T and writes P. Of the producer warpgroup one thread starts TMA loads of q, k, v and
// M, and a warp computes the tables of decays.
//
// M is a hi/lo split: its rounding would dominate the error of out for correlated keys. S, R, U and P are rounded once.
//
// Blocks of 64 rows of V of a head belong to one block, in pairs; with an odd number one warpgroup idles. Where work tiles
// outnumber the multiprocessors, blocks share them by chunks (cuda/chunked/scheduler.cuh). A block takes a packed sequence
// whole. Neighboring heads are work tiles of different blocks at the same time, where that takes hardly longer: they are
// neighbors in memory, and value heads of a key head read q and k from memory once.
#pragma once

#include "cuda/chunked/state_carry.cuh"
#include "delta_rule/cuda/chunk_matrices_sm90.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"
#include "delta_rule/cuda/step_tiles.cuh"

namespace ssm_kernels::cuda::chunked {

template <>
inline constexpr bool kAreStrided<Unpacked<delta_rule::DeltaRuleFwdParams>> = true;

}  // namespace ssm_kernels::cuda::chunked

namespace ssm_kernels::delta_rule {

template <int columns>
struct FwdSm90Shared {
  static constexpr int kStages = 3, kMatrices = 2;
  struct Stage {
    SmemTile<columns> q, k;
    SmemTile<kStateRows> v[kWarpgroups];
  };
  // M^T, of which rows are steps j, and P, of which rows are steps i.
  struct Matrices {
    ChunkMatrix inverse;
    SmemTile<kChunk> p;
  };
  Stage stages[kStages];
  Matrices matrices[kMatrices];
  SmemTile<kStateRows> out[kWarpgroups];
  ScanTables tables[kStages];
  Mbarrier full[kStages], empty[kStages], matrices_full[kMatrices], matrices_empty[kMatrices];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(FwdSm90Shared)); }
};

// out = y. (cuda/chunked/epilogue.cuh)
struct RoundOut {
  __device__ __forceinline__ RoundOut(const DeltaRuleFwdParams&, const StateTile&, const FragmentLane&) {}

  template <typename Scalar, typename Order, int blocks>
  __device__ __forceinline__ void round(const float (&y)[blocks][4], const uint32_t (&)[kStepGroups][4], SmemTile<kStateRows>*,
                                        SmemTile<kStateRows>& tile, const FragmentLane& lane) const {
#pragma unroll
    for (int i = 0; i < blocks / 2; ++i) {
      uint32_t rounded[4];
      pack_operand<Scalar>(y, i, rounded);
      cuda::stmatrix_transposed(tile.ldmatrix_row(16 * i, 2 * lane.warp, lane.index), rounded);
    }
  }
};

// states_only: without out, and q, which it needs.
template <typename Scalar, int columns, bool states_only, bool has_updates>
struct FwdSm90 {
  using Params = DeltaRuleFwdParams;
  using Gates = DecayGates<Scalar>;
  using Shared = FwdSm90Shared<columns>;
  using TileState = State<columns>;
  using Epilogue = std::conditional_t<has_updates, UpdatesEpilogue<Scalar, RoundOut, Params>,
                                      TmaEpilogue<Scalar, InOrder, RoundOut, Params>>;
  static constexpr bool kIsOfMaps = states_only;
  static constexpr int kStateGroups = columns / 16, kOutBlocks = kChunkRows<has_updates> / kBlockSteps;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads, kThreads = kConsumerThreads + 2 * kWarpgroupThreads;
  static constexpr int kTileColumns = 64;  // of a TMA tile
  static constexpr int kConsumerRegisters = 208, kMatrixRegisters = 64, kProducerRegisters = 32;
  static_assert(kWarpgroups * kConsumerRegisters + kMatrixRegisters + kProducerRegisters <= 4 * 128,
                "a block starts with 128 registers a thread");
  // One warp would make the tables more slowly than consumers use them. Each of two fetches one chunk of gates ahead: registers
  // are few. A wait for the last use of a stage tells uses apart by parity, and with three warps the one before that could
  // pass.
  static constexpr int kFetchedAhead = 1, kTableWarps = 2;
  static_assert(Shared::kStages == 3 && kTableWarps <= 2, "a warp waits for the last use of a stage");
  static constexpr int kMatrixBarrier = kPartialOutIsRead + 1;

  const Params& p;
  const Unpacked<Params>& unpacked;  // the scheduler of chunks; packed sequences are work tiles of one range each
  const Schedule& schedule;
  Shared& shared;

  // Run by all threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x < Shared::kStages) {
      shared.full[threadIdx.x].init(1 + kWarpSize);
      shared.empty[threadIdx.x].init(kConsumerThreads + kWarpgroupThreads);
    }
    if (threadIdx.x < Shared::kMatrices) {
      shared.matrices_full[threadIdx.x].init(1 + kWarpgroupThreads);
      shared.matrices_empty[threadIdx.x].init(kConsumerThreads);
    }
  }

  // Calls body(scheduler, span) for the segments of the block's range.
  template <typename Body>
  __device__ __forceinline__ void for_each_span(const Body& body) const {
    TileScheduler<Unpacked<Params>> scheduler(unpacked, schedule);
#pragma unroll 1
    while (!scheduler.is_done()) {
      body(scheduler, p.cu_seqlens == nullptr ? scheduler.span() : WorkSpan(p, schedule, scheduler.work_tile().index));
      scheduler.advance();
    }
  }

  __device__ __forceinline__ void produce() {
    const int warp = threadIdx.x / kWarpSize - (kWarpgroups + 1) * kWarpgroupWarps;
    PipelineState pipeline, matrices;
    if (warp == 0 && threadIdx.x % kWarpSize == 0) {
      for_each_span([&](const auto&, const WorkSpan& at) { load(at, pipeline, matrices); });
      cuda::grid_dependency_sync();  // in a block without chunks, too
    } else if (warp >= 1 && warp <= kTableWarps) {
      for_each_span([&](const auto&, const WorkSpan& at) { produce_decays(at, warp - 1, pipeline); });
    }
  }

  // Run by one thread. Steps past the end of the tensor are zeros; those past the end of a packed sequence belong to the next
  // one.
  __device__ __forceinline__ void load(const WorkSpan& at, PipelineState& pipeline, PipelineState& matrices) {
    const int key_head = at.group / p.value_heads_per_key_head, first_row = StateTile(p, schedule, at, 0).first_row,
              batch = static_cast<int>(at.batch);
    const int64_t first_number = chunk_number(p, at, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < at.chunks; ++chunk) {
      if (pipeline.phase > 0) shared.empty[pipeline.stage].wait(pipeline.phase - 1);
      auto& target = shared.stages[pipeline.stage];
      Mbarrier& full = shared.full[pipeline.stage];
      const int step = static_cast<int>(at.start) + chunk * kChunk;
      const int q_bytes = states_only ? 0 : static_cast<int>(sizeof(target.q)) >> (has_updates ? p.log2_updates : 0);
      full.arrive_and_expect_tx(sizeof(target) - sizeof(target.q) + q_bytes);
#pragma unroll
      for (int panel = 0; panel < columns / kTileColumns; ++panel) {
        cuda::tma_load_tile(&target.k.panels[panel], p.k_descriptor, panel * kTileColumns, key_head, step, batch, full);
      }
#pragma unroll
      for (int panel = 0; panel < (states_only ? 0 : columns / kTileColumns); ++panel) {
        cuda::tma_load_tile(&target.q.panels[panel], p.q_descriptor, panel * kTileColumns, key_head,
                            has_updates ? step >> p.log2_updates : step, batch, full);
      }
#pragma unroll
      for (int i = 0; i < kWarpgroups; ++i) {
        cuda::tma_load_tile(&target.v[i], p.v_descriptor, first_row + i * kStateRows, at.group, step, batch, full);
      }
      pipeline.advance(Shared::kStages);
      if (matrices.phase > 0) shared.matrices_empty[matrices.stage].wait(matrices.phase - 1);
      Mbarrier& matrices_full = shared.matrices_full[matrices.stage];
      matrices_full.arrive_and_expect_tx(kChunkMatrixBytes);
      cuda::grid_dependency_sync();  // with the kernel that computes the inverses
      shared.matrices[matrices.stage].inverse.load(p.inverses, (first_number + chunk) * p.heads + at.group, matrices_full);
      matrices.advance(Shared::kMatrices);
    }
  }

  __device__ __forceinline__ void produce_decays(const WorkSpan& at, int table_warp, PipelineState& pipeline) {
    using Fetched = FetchedSteps<Gates>;
    const auto source = Gates::source(p, at, at.group, 0);
    cuda::produce_tables<1, Fetched, kFetchedAhead>(
        at.chunks, WarpShare<kTableWarps>{table_warp}, Shared::kStages, pipeline, shared.full, shared.empty,
        [&](int chunk, Fetched& fetched) {
          fetched.fetch(p, Gates::later(p, source, chunk), at.resets(p, chunk), at.steps_of(chunk));
        },
        [&](const Fetched* fetched) {
          StepTables<Gates> made;
          made.make(p, *fetched);
          return made;
        },
        [&](int stage, const Fetched&, const StepTables<Gates>& made, int) { made.store(shared.tables[stage]); });
  }

  // Run by the matrix warpgroup.
  __device__ __forceinline__ void make_matrices() {
    const FragmentLane lane = FragmentLane::opaque_thread();
    for (auto& matrices : shared.matrices) {
      matrices.inverse.clear_left_of_diagonal(threadIdx.x % kWarpgroupThreads, kWarpgroupThreads);
      if constexpr (!states_only && !has_updates) clear_right_of_diagonal(matrices.p, lane);
    }
    PipelineState stages, matrices;
    for_each_span([&](const auto&, const WorkSpan& at) {
#pragma unroll 1
      for (int left = at.chunks; left > 0; --left) {
        if (matrices.phase > 0) shared.matrices_empty[matrices.stage].wait(matrices.phase - 1);
        shared.full[stages.stage].wait(stages.phase);
        const int steps = at.steps_of(at.chunks - left);
        if (p.cu_seqlens != nullptr && steps < kChunk) clear_next_sequence(shared.stages[stages.stage], steps);
        if constexpr (!states_only) make_matrix(stages.stage, shared.matrices[matrices.stage].p, lane);
        shared.empty[stages.stage].arrive();
        cuda::fence_proxy_async();
        shared.matrices_full[matrices.stage].arrive();
        stages.advance(Shared::kStages);
        matrices.advance(Shared::kMatrices);
      }
    });
  }

  __device__ __forceinline__ void make_matrix(int stage, SmemTile<kChunk>& target, const FragmentLane& lane) {
    const auto& tiles = shared.stages[stage];
    const ScanTables& tables = shared.tables[stage];
    if constexpr (has_updates) return make_query_matrix<Scalar>(p, tiles.q, tiles.k, tables, target, kChunk, lane);
    float products[kStepBlocks][4];
    multiply_by_keys<Scalar>(tiles.q, tiles.k, products);
    const FragmentPairs<> pairs(lane);
    const float factors[2] = {tables.query_factor[lane.row], tables.query_factor[lane.row + 8]};
    visit_warp(lane, [&](auto warp) {
      apply_decays<warp, /*has_diagonal=*/true>(p, products, factors, tables, lane);
#pragma unroll
      for (int n = 0; n < 2 * warp + 2; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          pairs.at(target, n, half) = cuda::pack<Scalar>(products[n][2 * half], products[n][2 * half + 1]);
        }
      }
    });
  }

  // Clears k and v of the steps from `steps` on.
  static __device__ __forceinline__ void clear_next_sequence(typename Shared::Stage& tiles, int steps) {
    clear_steps(tiles.k.panels, steps);
#pragma unroll
    for (auto& tile : tiles.v) clear_steps(tile.panels, steps);
    cuda::barrier_sync(kMatrixBarrier, kWarpgroupThreads);
  }

  // Clears the blocks right of the diagonal, once: the others are written for each chunk.
  static __device__ __forceinline__ void clear_right_of_diagonal(SmemTile<kChunk>& tile, const FragmentLane& lane) {
    if (lane.pair != 0) return;
    for (int half = 0; half < 2; ++half) {
      for (int block = 2 * lane.warp + 2; block < kStepBlocks; ++block) *tile.vector(lane.row + 8 * half, block) = {0, 0, 0, 0};
    }
  }

  // Run by a consumer warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const FragmentLane lane = FragmentLane::opaque_thread();
    PipelineState stages, matrices;
    const StateCarry<columns, ScalarMap, Unpacked<Params>> carry(unpacked, schedule, index);
    for_each_span([&](const auto& scheduler, const WorkSpan& at) {
      const StateTile state_tile(p, schedule, at, index);
      TileState state;
      carry.load_before(state, scheduler, lane);
      scan_span(state, at, state_tile, index, lane, stages, matrices,
                [&](int left) { carry.store_chunk_state(state, scheduler, left, lane); });
      carry.store_after(state, scheduler, lane);
    });
    Epilogue::wait_for_sent();
  }

  template <typename StoreChunkState>
  __device__ __forceinline__ void scan_span(TileState& state, const WorkSpan& at, const StateTile& state_tile, int index,
                                            const FragmentLane& lane, PipelineState& stages, PipelineState& matrices,
                                            const StoreChunkState& store_chunk_state) {
    const Epilogue out(p, at, state_tile, lane);
#pragma unroll 1
    for (int left = at.chunks; left > 0; --left) {
      shared.full[stages.stage].wait(stages.phase);
      // Before any product: the compiler waits for those in flight before a loop.
      shared.matrices_full[matrices.stage].wait(matrices.phase);
      auto& tiles = shared.stages[stages.stage];
      const ScanTables& tables = shared.tables[stages.stage];
      const uint64_t k_rows = make_operand(tiles.k), q_rows = make_operand(tiles.q);

      uint32_t s[kStateGroups][4];
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
      uint32_t x[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::ldmatrix_transposed(x[j], tiles.v[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
      }
      float u[kStepBlocks][4], y[kOutBlocks][4];
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) cuda::gemm<Scalar, false>(u, s[k], columns_of(k_rows, k), k > 0);
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(u);
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        const float2 decay = column_pair(tables.exp_cumsum, n, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t& pair = x[n / 2][n % 2 * 2 + half];
          const float2 v = cuda::unpack<Scalar>(pair);
          pair = cuda::pack<Scalar>(fmaf(-decay.x, u[n][2 * half], v.x), fmaf(-decay.y, u[n][2 * half + 1], v.y));
        }
      }
      auto& factors = shared.matrices[matrices.stage];
      cuda::warpgroup_arrive();
      factors.inverse.template multiply<Scalar>(u, x);
      cuda::warpgroup_commit();
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < (states_only ? 0 : kStateGroups); ++k) {
        cuda::gemm<Scalar, false>(y, s[k], columns_of(q_rows, k), k > 0);
      }
      cuda::warpgroup_commit();
      if constexpr (!states_only) {
        // All warps have written the previous chunk's out.
        sync_warpgroup(index);
        if (left < at.chunks) out.send(shared.out[index], at.chunks - left - 1);
      }
      cuda::warpgroup_wait<1>(u);

      uint32_t scaled[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        pack_operand<Scalar>(u, j, x[j]);
#pragma unroll
        for (int n = 2 * j; n < 2 * j + 2; ++n) {
          const float2 to_end = column_pair(tables.gain_to_chunk_end, n, lane);
#pragma unroll
          for (int i = 0; i < 4; ++i) u[n][i] *= i % 2 == 0 ? to_end.x : to_end.y;
        }
        pack_operand<Scalar>(u, j, scaled[j]);
      }
      state.decay(tables.chunk_decay);
      const bool keeps_state = !has_reset(p, tables);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, true>(state.values, scaled[j], rows_of(k_rows, j), j > 0 || keeps_state);
      }
      cuda::warpgroup_commit();
      if constexpr (!states_only) {
        cuda::warpgroup_wait<1>(y);
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
          const float2 decay = query_pair<has_updates>(p, tables.query_decay, n, lane);
#pragma unroll
          for (int i = 0; i < 4; ++i) y[n][i] *= i % 2 == 0 ? decay.x : decay.y;
        }
        const uint64_t p_rows = make_operand(factors.p);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) cuda::gemm<Scalar, false>(y, x[j], columns_of(p_rows, j), true);
        cuda::warpgroup_commit();
        out.wait_for_sent();
        sync_warpgroup(index);
      }
      cuda::warpgroup_wait<0>(state.values);
      if constexpr (!states_only) cuda::warpgroup_wait<0>(y);
      shared.matrices_empty[matrices.stage].arrive();
      shared.empty[stages.stage].arrive();
      if constexpr (!states_only) out.write(y, x, nullptr, shared.out[index], lane);
      stages.advance(Shared::kStages);
      matrices.advance(Shared::kMatrices);
      store_chunk_state(left - 1);
    }
    if constexpr (!states_only) {
      sync_warpgroup(index);
      out.send_last(shared.out[index]);
    }
  }
};

template <typename Scalar, int columns, bool states_only, bool has_updates>
constexpr bool kHasMatrixWarpgroup<FwdSm90<Scalar, columns, states_only, has_updates>> = true;

template <typename Scalar, int columns, bool states_only, bool has_updates>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? FwdSm90<Scalar, columns, states_only, has_updates>::kThreads
                                                        : kWarpSize,
                                  1) delta_rule_fwd_sm90_kernel(const __grid_constant__ Unpacked<DeltaRuleFwdParams> p,
                                                                const __grid_constant__ Schedule schedule) {
#if SSM_KERNELS_HAS_WGMMA
  run_scan<FwdSm90<Scalar, columns, states_only, has_updates>>(p, schedule);
#endif
}

}  // namespace ssm_kernels::delta_rule
