// The last kernel of the delta rule's backward with wgmma: all gradients of the steps, of all chunks in any order, from the
// states S before each chunk and their gradients D after it (bwd_states.cuh). With g the gradient of out, U = diag(beta) E the
// additions to the state, s the cumulative sum of log decays from the chunk's start, l its last step, and G(i, j) =
// e^(s_i - s_j) for j <= i:
//
//   dv = diag(beta) Y             dbeta_i = Y_i . E_i
//   F  = scale tril(g U^T G)      B = -tril(dv U^T G, -1)         gradients of Q K^T and K K^T
//   dq = scale e^(s_i) (g S) + F K
//   dk = -e^(s_i) (dv S) + beta_j e^(s_l - s_j) (E D) + F^T Q + (B + B^T) K
//
// It reads dv, which the states' kernel has written. Y_i is dv_i / beta_i, but for a small beta_i (bwd_workspace.cuh).
//
// The log decay of step t is a factor of all that passes over t, and its gradient is the sum of these terms, none of which is
// subtracted from another:
//
//   sum over j < t <= i of (F Q K^T + B K K^T)(i, j)  +  sum over i >= t of what step i reads of S, by q_i and k_i
//   +  sum over j < t of what step j adds to D, by k_j  +  e^(s_l) <S, D>
//
// With qk_l2norm these are products with the rows of q and k as they are in memory, times the factors of the tables
// (step_tables.cuh): F and B get the factors of their rows and columns.
//
// A block takes chunks of value heads in turn. Its first consumer warpgroup computes F, B, dbeta and the sums of pairs of
// steps, the second dq and <S, D>, the third dk; rows of all their accumulators are steps. The first writes F and B to shared
// memory, where they and their transposes are operands of the others. A warp of the fourth warpgroup computes the gradients of
// log decays and betas from all sums. Two threads load by TMA: one fills stages of a pipeline, each with 64 rows of V, over
// which products are summed; the other loads q and k once for a chunk. If several value heads share a key head, a block
// computes their chunks one after another and adds up their dq and dk (bwd_gradients.cuh).
#pragma once

#include "common/delta_gates.h"
#include "cuda/lane_sums.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_decay_sums.cuh"
#include "delta_rule/cuda/bwd_gradients.cuh"
#include "delta_rule/cuda/bwd_pair_factors.cuh"
#include "delta_rule/cuda/step_tiles.cuh"

namespace ssm_kernels::delta_rule {

template <int columns>
struct BwdChunksShared {
  // A turn's place is overwritten kTurns turns later, when the tables of the turn kTables later have been released.
  static constexpr int kStages = 3, kTables = 2, kTurns = 4;
  struct Turn {
    alignas(ChunkOfHead) unsigned char place[sizeof(ChunkOfHead)];
    bool is_last;  // without a chunk

    __device__ __forceinline__ ChunkOfHead& chunk() { return *reinterpret_cast<ChunkOfHead*>(place); }
  };
  struct alignas(kOperandAlignment) Stage {
    SmemTile<columns> s, d;
    SmemTile<kChunk> e;  // these three as in BwdStatesOfChunk
    SmemTile<kStateRows> grad_v, grad_out;
  };
  Stage stages[kStages];
  SmemTile<columns> q, k;
  SmemTile<kChunk> f, b;
  BwdTables tables[kTables];
  DecaySums sums[kTables];
  BetaSums beta_sums[kTables];
  Turn turns[kTurns];
  Mbarrier full[kStages], empty[kStages], rows_full, rows_empty, tables_full[kTables], tables_empty[kTables], pairs_full,
      pairs_empty, sums_full[kTables];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdChunksShared)); }
};

// With two `parts` every second block takes the second part of the keys' columns; these blocks run beside those of the first
// part, which read the same E and gradients of v. If several value heads share a key head, the kernel is_grouped.
template <typename Scalar, int columns, bool is_grouped, int parts = 1>
struct BwdChunks {
  using Shared = BwdChunksShared<columns>;
  static constexpr int kStateGroups = columns / 16, kColumnBlocks = columns / 8, kTileColumns = 64;
  static constexpr int kConsumers = 3, kConsumerThreads = kConsumers * kWarpgroupThreads,
                       kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kPairsRegisters = 152, kQueriesRegisters = 144, kKeysRegisters = 184, kProducerRegisters = 32;
  static constexpr int kConsumerBarrier = 1, kRowsBarrier = 2;  // __syncthreads() is 0; kRowsBarrier of q and the next one

  const DeltaRuleBwdParams& p;
  Shared& shared;
  const BwdGradients<Scalar, columns> gradients{p};

  // Run by all threads.
  __device__ __forceinline__ void run() {
    if (threadIdx.x < Shared::kStages) {
      shared.full[threadIdx.x].init(1);
      shared.empty[threadIdx.x].init(kConsumerThreads);
    }
    if (threadIdx.x < Shared::kTables) {
      shared.tables_full[threadIdx.x].init(1);
      shared.tables_empty[threadIdx.x].init(kConsumerThreads + kWarpSize);
      shared.sums_full[threadIdx.x].init(kConsumerThreads);
    }
    if (threadIdx.x == 0) {
      shared.rows_full.init(1);
      shared.rows_empty.init(kConsumerThreads);
      shared.pairs_full.init(kWarpgroupThreads);
      shared.pairs_empty.init(kConsumerThreads);
    }
    __syncthreads();
    cuda::grid_dependency_sync();
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    if (warpgroup == 0) {
      cuda::warpgroup_reg_alloc<kPairsRegisters>();
      consume_pairs();
    } else if (warpgroup == 1) {
      cuda::warpgroup_reg_alloc<kQueriesRegisters>();
      consume_queries();
    } else if (warpgroup == 2) {
      cuda::warpgroup_reg_alloc<kKeysRegisters>();
      consume_keys();
    } else {
      cuda::warpgroup_reg_dealloc<kProducerRegisters>();
      const int thread = threadIdx.x % kWarpgroupThreads;
      if (thread == 0) produce_stages();
      if (thread == kWarpSize) produce_rows();
      if (thread / kWarpSize == 2) consume_sums();
    }
  }

 private:
  // The chunks of the block's turns, for a producer. The value heads of a key head follow one another. The first chunks of all
  // rows come before the second ones: the states' kernel has written their D and dv last, which the L2 cache may still hold.
  template <typename Body>
  __device__ __forceinline__ void for_each_chunk(const Body& body) const {
    const unsigned places = static_cast<unsigned>(chunk_numbers(p.batch, p.seqlen, is_packed(p)) * p.heads);
    const unsigned each = p.value_heads_per_key_head, stride = gridDim.x / parts * each;
    for (unsigned place = blockIdx.x / parts * each, index = 0; place < places;) {
      const ChunkOfHead at(p, static_cast<int>(in_order(place) + index));
      if (at.is_there()) body(at);
      if (++index < each) continue;
      index = 0;
      place += stride;
    }
  }
  // The place whose turn is `turn`. Both are multiples of the value heads of a key head.
  __device__ __forceinline__ unsigned in_order(unsigned turn) const {
    if (is_packed(p) || p.batch == 1) return turn;
    const unsigned heads = static_cast<unsigned>(p.heads), batch = static_cast<unsigned>(p.batch), number = turn / heads;
    return (number % batch * static_cast<unsigned>((p.seqlen + kChunk - 1) / kChunk) + number / batch) * heads + turn % heads;
  }
  __device__ __forceinline__ int blocks_of_rows() const { return static_cast<int>(row_blocks(p.headdim)); }

  // Calls body(at, tables_at) with the chunks that produce_stages() has published, and their tables.
  template <typename Body>
  __device__ __forceinline__ void for_each_turn(const Body& body) {
    PipelineState tables_at;
#pragma unroll 1
    for (unsigned turn = 0;; ++turn) {
      shared.tables_full[tables_at.stage].wait(tables_at.phase);
      auto& place = shared.turns[turn % Shared::kTurns];
      if (place.is_last) return;
      body(place.chunk(), tables_at);
      tables_at.advance(Shared::kTables);
    }
  }

  // Run by one thread. It publishes each chunk with the chunk's tables.
  __device__ __forceinline__ void produce_stages() {
    PipelineState pipeline, tables;
    unsigned turn = 0;
    const auto next_turn = [&]() -> auto& {
      if (tables.phase > 0) shared.tables_empty[tables.stage].wait(tables.phase - 1);
      return shared.turns[turn++ % Shared::kTurns];
    };
    for_each_chunk([&](const ChunkOfHead& at) {
      auto& place = next_turn();
      place.chunk() = at;
      place.is_last = false;
      Mbarrier& tables_full = shared.tables_full[tables.stage];
      tables_full.arrive_and_expect_tx(sizeof(BwdTables));
      cuda::tma_load(&shared.tables[tables.stage], &matrices_of_chunk(p, at.number, at.head)->tables, sizeof(BwdTables),
                     tables_full);
      tables.advance(Shared::kTables);
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        if (pipeline.phase > 0) shared.empty[pipeline.stage].wait(pipeline.phase - 1);
        auto& target = shared.stages[pipeline.stage];
        Mbarrier& full = shared.full[pipeline.stage];
        full.arrive_and_expect_tx(sizeof(target));
        cuda::tma_load_tile(&target.grad_v, p.grad_v_descriptor, block * kStateRows, at.head, at.first(),
                            static_cast<int>(at.batch), full);
        load_update_tile(&target.grad_out, p, p.grad_out_descriptor, p.grad_out_of_updates, block * kStateRows, at.head,
                         at.first(), static_cast<int>(at.batch), full);
        const BwdStatesOfChunk<columns>& states = *states_of_chunk<columns>(p, at.number, at.head, block);
        if constexpr (kHasLowBits<Scalar>) cuda::prefetch(&states.low_bits, sizeof(states.low_bits));
        if constexpr (parts == 1) {
          cuda::tma_load(&target.s, &states, sizeof(target.s) + sizeof(target.d) + sizeof(target.e), full);
        } else {
          constexpr int kBytes = sizeof(BwdStatePart);
          const bool is_first = blockIdx.x % parts == 0;
          cuda::tma_load(&target.s, is_first ? static_cast<const void*>(&states) : second_part_of(p, &states), kBytes, full);
          cuda::tma_load(&target.e, &states.e, sizeof(target.e), full);
        }
        pipeline.advance(Shared::kStages);
      }
    });
    next_turn().is_last = true;
    shared.tables_full[tables.stage].arrive();
  }

  // Run by another thread than produce_stages(), so that later chunks' stages do not wait until q and k may be overwritten.
  __device__ __forceinline__ void produce_rows() {
    PipelineState rows;
    for_each_chunk([&](const ChunkOfHead& at) {
      const int key_head = at.head / p.value_heads_per_key_head, batch = static_cast<int>(at.batch);
      if (rows.phase > 0) shared.rows_empty.wait(rows.phase - 1);
      shared.rows_full.arrive_and_expect_tx(sizeof(shared.q) + sizeof(shared.k));
#pragma unroll
      for (int panel = 0; panel < columns / kTileColumns; ++panel) {
        const int column = panel * kTileColumns;
        cuda::tma_load_tile(&shared.k.panels[panel], p.k_descriptor, column, key_head, at.first(), batch, shared.rows_full);
        load_update_tile(&shared.q.panels[panel], p, p.q_descriptor, p.q_of_updates, column, key_head, at.first(), batch,
                         shared.rows_full);
      }
      rows.advance(1);
    });
  }

  // Waits for the stage of a block of rows.
  __device__ __forceinline__ auto& wait_for_stage(const PipelineState& pipeline, const ChunkOfHead& at) {
    shared.full[pipeline.stage].wait(pipeline.phase);
    auto& stage = shared.stages[pipeline.stage];
    if (is_packed(p) && at.steps() < kChunk) {
      clear_steps(stage.grad_out.panels, at.steps());
      clear_steps(stage.grad_v.panels, at.steps());
      cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
    }
    return stage;
  }
  __device__ __forceinline__ void wait_for_rows(const PipelineState& rows, const ChunkOfHead& at) {
    shared.rows_full.wait(rows.phase);
    if (is_packed(p) && at.steps() < kChunk) {
      clear_steps(shared.q.panels, at.steps());
      clear_steps(shared.k.panels, at.steps());
      cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
    }
  }

  // Run by a warp without other work: the gradients of log decays and betas.
  __device__ __forceinline__ void consume_sums() {
    const FragmentLane lane;
    for_each_turn([&](const ChunkOfHead& at, const PipelineState& tables_at) {
      shared.sums_full[tables_at.stage].wait(tables_at.phase);
      const BwdTables& tables = shared.tables[tables_at.stage];
      if (p.grad_beta.data != nullptr) gradients.write_betas(at, shared.beta_sums[tables_at.stage], tables, lane);
      if (p.grad_log_decay.data != nullptr) {
        write_grad_log_decay(p, p.grad_log_decay, at, shared.sums[tables_at.stage], tables, lane);
      }
      shared.tables_empty[tables_at.stage].arrive();
    });
  }

  // Run by the first consumer warpgroup: F, B, the gradient of beta and the sums of pairs of steps.
  __device__ __forceinline__ void consume_pairs() {
    const FragmentLane kept_lane = FragmentLane::opaque_thread();
    PipelineState pipeline, rows;
    for_each_turn([&](const ChunkOfHead& at, const PipelineState& tables_at) {
      // Addresses are recomputed: kept through the turns, they would spill.
      const FragmentLane lane = kept_lane.opaque();
      const FragmentPairs<> pairs(lane);
      const BwdTables& tables = shared.tables[tables_at.stage];
      DecaySums& sums = shared.sums[tables_at.stage];
      float f[kStepBlocks][4], b[kStepBlocks][4];
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        auto& stage = wait_for_stage(pipeline, at);
        const uint64_t g_rows = make_operand(stage.grad_out), v_rows = make_operand(stage.grad_v),
                       e_rows = make_operand(stage.e);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kStepGroups; ++k) {
          cuda::gemm<Scalar, false, true>(f, columns_of(g_rows, k), rows_of(e_rows, k), block > 0 || k > 0);
          cuda::gemm<Scalar, false, true>(b, columns_of(v_rows, k), rows_of(e_rows, k), block > 0 || k > 0);
        }
        cuda::warpgroup_commit();
        cuda::warpgroup_wait<0>(f);
        cuda::warpgroup_wait<0>(b);
        shared.empty[pipeline.stage].arrive();
        pipeline.advance(Shared::kStages);
      }
      wait_for_rows(rows, at);
      const uint64_t q_rows = make_operand(shared.q), k_rows = make_operand(shared.k);
      float products[kStepBlocks][4];
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::gemm<Scalar, false, false>(products, columns_of(q_rows, k), columns_of(k_rows, k), k > 0);
      }
      cuda::warpgroup_commit();
      gradients.put_diagonal(b, shared.beta_sums[tables_at.stage].products, lane);
      apply_factors(p, f, b, tables, lane);
      if (rows.phase > 0) shared.pairs_empty.wait(rows.phase - 1);
      put(shared.f, f, pairs);
      put(shared.b, b, pairs);
      cuda::fence_proxy_async();
      shared.pairs_full.arrive();
      cuda::warpgroup_wait<0>(products);
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[n][i] *= products[n][i];
      }
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::gemm<Scalar, false, false>(products, columns_of(k_rows, k), columns_of(k_rows, k), k > 0);
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(products);
      shared.pairs_empty.arrive();
      shared.rows_empty.arrive();
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[n][i] = fmaf(b[n][i], products[n][i], f[n][i]);
      }
      sum_pairs<Scalar>(f, sums.pairs[lane.warp], lane);
      shared.sums_full[tables_at.stage].arrive();
      if (tables.has_small_beta && p.grad_beta.data != nullptr) {
        gradients.template write_small_betas<columns>(at, tables, lane);
      }
      shared.tables_empty[tables_at.stage].arrive();
      rows.advance(1);
    });
  }

  // Run by the second consumer warpgroup: the gradient of q, and <S, D>.
  __device__ __forceinline__ void consume_queries() {
    const FragmentLane kept_lane = FragmentLane::opaque_thread();
    PipelineState pipeline, rows;
    for_each_turn([&](const ChunkOfHead& at, const PipelineState& tables_at) {
      // Addresses are recomputed: kept through the turns, they would spill.
      const FragmentLane lane = kept_lane.opaque();
      const FragmentPairs<> pairs(lane);
      const DeltaRuleTables& tables = shared.tables[tables_at.stage];
      DecaySums& sums = shared.sums[tables_at.stage];
      float dq[kColumnBlocks][4], of_states[2][4] = {};
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        auto& stage = wait_for_stage(pipeline, at);
        const uint64_t g_rows = make_operand(stage.grad_out), s_rows = make_operand(stage.s);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kStepGroups; ++k) {
          cuda::gemm<Scalar, false, true>(dq, columns_of(g_rows, k), rows_of(s_rows, k), block > 0 || k > 0);
        }
        cuda::warpgroup_commit();
        multiply_states(of_states, stage.s, stage.d, lane);
        cuda::warpgroup_wait<0>(dq);
        shared.empty[pipeline.stage].arrive();
        pipeline.advance(Shared::kStages);
      }
      const float sum_of_states = cuda::sum_over_warp(diagonal_of(of_states, lane));
      if (lane.index == 0) sums.states[lane.warp] = sum_of_states;
      wait_for_rows(rows, at);
      float row_sums[2];
      const float scale[2] = {tables.query_decay[lane.row], tables.query_decay[lane.row + 8]};
      scale_rows(dq, scale, shared.q, pairs, row_sums);
      put_row_sums(row_sums, sums.reads[0], lane);
      shared.sums_full[tables_at.stage].arrive();
      shared.tables_empty[tables_at.stage].arrive();
      shared.pairs_full.wait(rows.phase);
      const uint64_t k_rows = make_operand(shared.k), f_rows = make_operand(shared.f);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, false, true>(dq, columns_of(f_rows, j), rows_of(k_rows, j), true);
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(dq);
      shared.pairs_empty.arrive();
      write_rows(at, p.grad_q, p.grad_q_descriptor, dq, 0, shared.q, rows, pairs, lane);
      rows.advance(1);
    });
  }

  // Run by the third consumer warpgroup: the gradient of k.
  __device__ __forceinline__ void consume_keys() {
    const FragmentLane kept_lane = FragmentLane::opaque_thread();
    PipelineState pipeline, rows;
    for_each_turn([&](const ChunkOfHead& at, const PipelineState& tables_at) {
      // Addresses are recomputed: kept through the turns, they would spill.
      const FragmentLane lane = kept_lane.opaque();
      const FragmentPairs<> pairs(lane);
      const DeltaRuleTables& tables = shared.tables[tables_at.stage];
      DecaySums& sums = shared.sums[tables_at.stage];
      float dk[kColumnBlocks][4], added[kColumnBlocks][4];
      LowBitSums of_low_bits;
      of_low_bits.clear();
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        uint4 low_bits;
        if constexpr (kHasLowBits<Scalar>) {
          const auto& states = *states_of_chunk<columns>(p, at.number, at.head, block);
          low_bits = __ldcg(&states.low_bits[threadIdx.x % kWarpgroupThreads]);
        }
        auto& stage = wait_for_stage(pipeline, at);
        const uint64_t v_rows = make_operand(stage.grad_v), s_rows = make_operand(stage.s), e_rows = make_operand(stage.e),
                       d_rows = make_operand(stage.d);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kStepGroups; ++k) {
          const bool adds = block > 0 || k > 0;
          cuda::gemm<Scalar, false, true>(dk, columns_of(v_rows, k), rows_of(s_rows, k), adds);
          cuda::gemm<Scalar, true, true>(added, rows_of(e_rows, k), rows_of(d_rows, k), adds);
        }
        cuda::warpgroup_commit();
        if constexpr (kHasLowBits<Scalar>) of_low_bits.add(stage.grad_v, stage.e, low_bits, lane);
        cuda::warpgroup_wait<0>(dk);
        cuda::warpgroup_wait<0>(added);
        shared.empty[pipeline.stage].arrive();
        pipeline.advance(Shared::kStages);
      }
      wait_for_rows(rows, at);
      add_scaled(dk, added, tables, sums, pairs, lane);
      if constexpr (kHasLowBits<Scalar>) of_low_bits.put(shared.beta_sums[tables_at.stage].low_bits[lane.warp], lane);
      shared.sums_full[tables_at.stage].arrive();
      shared.tables_empty[tables_at.stage].arrive();
      const uint64_t q_rows = make_operand(shared.q), k_rows = make_operand(shared.k), f_rows = make_operand(shared.f),
                     b_rows = make_operand(shared.b);
      shared.pairs_full.wait(rows.phase);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, false, true>(dk, columns_of(b_rows, j), rows_of(k_rows, j), true);
        cuda::gemm<Scalar, true, true>(dk, rows_of(b_rows, j), rows_of(k_rows, j), true);
        cuda::gemm<Scalar, true, true>(dk, rows_of(f_rows, j), rows_of(q_rows, j), true);
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(dk);
      shared.pairs_empty.arrive();
      write_rows(at, p.grad_k, p.grad_k_descriptor, dk, 1, shared.k, rows, pairs, lane);
      rows.advance(1);
    });
  }

 private:
  // Writes the gradients of q or k: to the tile of these rows, once no product reads it, and from there to memory. The host
  // applies the norms to fp32 rows.
  __device__ __forceinline__ void write_rows(const ChunkOfHead& at, const RowsView& view, const cuda::TmaDescriptor& descriptor,
                                             float (&d)[kColumnBlocks][4], int index, SmemTile<columns>& tile,
                                             const PipelineState& rows, const FragmentPairs<>& pairs,
                                             const FragmentLane& lane) {
    const bool are_queries = index == 0;
    int key_head = at.head;
    if constexpr (is_grouped) {
      key_head = at.head / p.value_heads_per_key_head;
      const int value_head = at.head - key_head * p.value_heads_per_key_head;
      const bool is_last = value_head + 1 == p.value_heads_per_key_head;
      if (p.has_fp32_rows || !is_last) shared.rows_empty.arrive();
      gradients.add_value_head(d, value_head, is_last, index);
      if (!is_last) return;
    } else {
      if (p.has_fp32_rows) shared.rows_empty.arrive();
    }
    if (p.has_fp32_rows) return gradients.write_fp32_rows(at, view, key_head, are_queries, d, lane);
    if (p.row_factors.data != nullptr) gradients.apply_norm(d, tile, pairs);
    shared.pairs_empty.wait(rows.phase);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) pairs.at(tile, n, half) = cuda::pack<Scalar>(d[n][2 * half], d[n][2 * half + 1]);
    }
    cuda::fence_proxy_async();
    cuda::barrier_sync(kRowsBarrier + index, kWarpgroupThreads);
    if ((is_packed(p) && at.steps() < kChunk) || view.stride_step < 0 || (are_queries && p.log2_updates > 0)) {
      gradients.copy_rows(at, view, key_head, are_queries, tile);
    } else {
#pragma unroll
      for (int panel = 0; panel < columns / kTileColumns; ++panel) {
        cuda::tma_store_tile(descriptor, panel * kTileColumns, key_head, at.first(), static_cast<int>(at.batch),
                             &tile.panels[panel], threadIdx.x % kWarpgroupThreads == 0);
      }
      cuda::tma_store_wait_read<0>();
    }
    shared.rows_empty.arrive();
  }
  static __device__ __forceinline__ void put(SmemTile<kChunk>& tile, const float (&d)[kStepBlocks][4],
                                             const FragmentPairs<>& pairs) {
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) pairs.at(tile, n, half) = cuda::pack<Scalar>(d[n][2 * half], d[n][2 * half + 1]);
    }
  }

  // Scales the lane's rows; sums over their columns the products with the tile's rows.
  static __device__ __forceinline__ void scale_rows(float (&d)[kColumnBlocks][4], const float (&factors)[2],
                                                    SmemTile<columns>& tile, const FragmentPairs<>& pairs, float (&sums)[2]) {
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 row = cuda::unpack<Scalar>(pairs.at(tile, n, half));
        d[n][2 * half] *= factors[half];
        d[n][2 * half + 1] *= factors[half];
        sums[half] = fmaf(d[n][2 * half], row.x, fmaf(d[n][2 * half + 1], row.y, sums[half]));
      }
    }
  }
  // Scales what the lane's steps read and what they add, and adds both up; sums over their columns the products
  // with the keys.
  __device__ __forceinline__ void add_scaled(float (&reads)[kColumnBlocks][4], const float (&adds)[kColumnBlocks][4],
                                             const DeltaRuleTables& tables, DecaySums& sums, const FragmentPairs<>& pairs,
                                             const FragmentLane& lane) {
    float sum_of_reads[2] = {0, 0}, sum_of_adds[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      const float of_reads = -tables.exp_cumsum[row], of_adds = tables.beta[row] * tables.gain_to_chunk_end[row];
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 key = cuda::unpack<Scalar>(pairs.at(shared.k, n, half));
        float &low = reads[n][2 * half], &high = reads[n][2 * half + 1];
        const float added_low = adds[n][2 * half], added_high = adds[n][2 * half + 1];
        sum_of_reads[half] = fmaf(low, key.x, fmaf(high, key.y, sum_of_reads[half]));
        sum_of_adds[half] = fmaf(added_low, key.x, fmaf(added_high, key.y, sum_of_adds[half]));
        low = fmaf(of_adds, added_low, of_reads * low);
        high = fmaf(of_adds, added_high, of_reads * high);
      }
      sum_of_reads[half] *= of_reads;
      sum_of_adds[half] *= of_adds;
    }
    put_row_sums(sum_of_reads, sums.reads[1], lane);
    put_row_sums(sum_of_adds, sums.adds, lane);
  }
  // Adds S D^T of the warp's 16 rows to its two accumulators of 8 columns, of which diagonal_of() reads the lane's elements on
  // the diagonal: their sum over the warp is <S, D> of these rows.
  static __device__ __forceinline__ void multiply_states(float (&sums)[2][4], SmemTile<columns>& s_tile,
                                                         SmemTile<columns>& d_tile, const FragmentLane& lane) {
#pragma unroll
    for (int k = 0; k < kStateGroups; ++k) {
      uint32_t s[4], d[4];
      cuda::ldmatrix(s, s_tile.ldmatrix_row(16 * lane.warp, 2 * k, lane.index));
      cuda::ldmatrix(d, d_tile.ldmatrix_row(16 * lane.warp, 2 * k, lane.index));
      const uint32_t rows[4] = {s[0], s[2], s[1], s[3]};
      cuda::mma<Scalar>(sums[0], rows, d[0], d[1]);
      cuda::mma<Scalar>(sums[1], rows, d[2], d[3]);
    }
  }
  static __device__ __forceinline__ float diagonal_of(const float (&sums)[2][4], const FragmentLane& lane) {
    float result = 0;
    if (lane.quad == 2 * lane.pair) result = sums[0][0] + sums[1][2];
    if (lane.quad == 2 * lane.pair + 1) result = sums[0][1] + sums[1][3];
    return result;
  }
};

template <typename Scalar, int columns, bool is_grouped>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdChunks<Scalar, columns, is_grouped>::kThreads : kWarpSize, 1)
    delta_rule_bwd_chunks_kernel(const __grid_constant__ DeltaRuleBwdParams p) {
#if SSM_KERNELS_HAS_WGMMA
  using Chunks = BwdChunks<Scalar, columns, is_grouped>;
  extern __shared__ unsigned char unaligned_memory[];
  Chunks{p, align_shared<typename Chunks::Shared>(unaligned_memory)}.run();
#endif
}

template <typename Scalar, bool is_grouped>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdChunks<Scalar, kStateColumns, is_grouped>::kThreads : kWarpSize, 1)
    delta_rule_bwd_wide_chunks_kernel(const __grid_constant__ DeltaRuleBwdParts p) {
#if SSM_KERNELS_HAS_WGMMA
  using Chunks = BwdChunks<Scalar, kStateColumns, is_grouped, kColumnParts>;
  extern __shared__ unsigned char unaligned_memory[];
  Chunks{p.of[blockIdx.x % kColumnParts], align_shared<typename Chunks::Shared>(unaligned_memory)}.run();
#endif
}

}  // namespace ssm_kernels::delta_rule
