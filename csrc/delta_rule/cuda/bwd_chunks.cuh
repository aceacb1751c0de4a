// The last kernel of the delta rule's backward with wgmma: all gradients of the steps, of all chunks in any order, from the
// states S before each chunk and their gradients D after it (bwd_states.cuh). With g the gradient of out, U = diag(beta) E the
// additions to the state, s the cumulative sum of log decays from the chunk's start, l its last step, and G(i, j) =
// e^(s_i - s_j) for j <= i:
//
//   dv = diag(beta) Y             dbeta_i = Y_i . E_i
//   F  = scale tril(g U^T G)      B = -diag(beta) tril(Y U^T G, -1)         gradients of Q K^T and K K^T
//   dq = scale e^(s_i) (g S) + F K
//   dk = -e^(s_i) beta_i (Y S) + beta_j e^(s_l - s_j) (E D) + F^T Q + (B + B^T) K
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
// A block takes chunks of value heads in turn. Its first consumer warpgroup computes F, B, dbeta and the gradients of log
// decays, the second dq and dv, the third dk; rows of all their accumulators are steps. The first writes F and B to shared
// memory, where they and their transposes are operands of the others. Two threads load by TMA: one fills stages of a pipeline,
// each with 64 rows of V, over which products are summed; the other loads q and k once for a chunk. If several value heads
// share a key head, a block computes their chunks one after another and adds up their dq and dk (bwd_gradients.cuh).
#pragma once

#include "common/delta_gates.h"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_decay_sums.cuh"
#include "delta_rule/cuda/bwd_gradients.cuh"
#include "delta_rule/cuda/step_tiles.cuh"

namespace ssm_kernels::delta_rule {

template <int columns>
struct BwdChunksShared {
  static constexpr int kStages = 3, kTables = 2;
  struct alignas(kOperandAlignment) Stage {
    BwdStatesOfChunk<columns> states;
    SmemTile<kStateRows> grad_out;
  };
  Stage stages[kStages];
  SmemTile<columns> q, k;
  SmemTile<kChunk> f, b;
  DeltaRuleTables tables[kTables];
  DecaySums sums[kTables];
  Mbarrier full[kStages], empty[kStages], rows_full, rows_empty, tables_full[kTables], tables_empty[kTables], pairs_full,
      pairs_empty, sums_full[kTables];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdChunksShared)); }
};

// With `grouped`, several value heads may share a key head.
// With two `parts` every second block takes the second part of the keys' columns; these blocks run beside those of the first
// part, which read the same E and Y.
template <typename Scalar, int columns, bool grouped, int parts = 1>
struct BwdChunks {
  using Shared = BwdChunksShared<columns>;
  static constexpr int kStateGroups = columns / 16, kColumnBlocks = columns / 8, kTileColumns = 64;
  static constexpr int kConsumers = 3, kConsumerThreads = kConsumers * kWarpgroupThreads,
                       kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kPairsRegisters = 160, kQueriesRegisters = 136, kKeysRegisters = 192, kProducerRegisters = 24;
  static constexpr int kConsumerBarrier = 1;  // __syncthreads() is 0

  const DeltaRuleBwdParams& p;
  Shared& shared;
  const BwdGradients<Scalar, columns, grouped> gradients{p};

  // Run by all threads.
  __device__ __forceinline__ void run() {
    if (threadIdx.x < Shared::kStages) {
      shared.full[threadIdx.x].init(1);
      shared.empty[threadIdx.x].init(kConsumerThreads);
    }
    if (threadIdx.x < Shared::kTables) {
      shared.tables_full[threadIdx.x].init(1);
      shared.tables_empty[threadIdx.x].init(kConsumerThreads);
      shared.sums_full[threadIdx.x].init(kConsumerThreads);
    }
    if (threadIdx.x == 0) {
      shared.rows_full.init(1);
      shared.rows_empty.init(kConsumerThreads);
      shared.pairs_full.init(kWarpgroupThreads);
      shared.pairs_empty.init((kConsumers - 1) * kWarpgroupThreads);
    }
    __syncthreads();
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
    }
  }

 private:
  // The value heads of a key head follow one another.
  template <typename Body>
  __device__ __forceinline__ void for_each_chunk(const Body& body) const {
    const unsigned places = static_cast<unsigned>(chunk_numbers(p.batch, p.seqlen, is_packed(p)) * p.heads);
    const unsigned each = grouped ? p.value_heads_per_key_head : 1, stride = gridDim.x / parts * each;
    for (unsigned place = blockIdx.x / parts * each, index = 0; place < places;) {
      const ChunkOfHead at(p, static_cast<int>(place + index));
      if (at.is_there()) body(at);
      if (grouped && ++index < each) continue;
      index = 0;
      place += stride;
    }
  }
  __device__ __forceinline__ int blocks_of_rows() const { return static_cast<int>(row_blocks(p.headdim)); }

  // Run by one thread.
  __device__ __forceinline__ void produce_stages() {
    PipelineState pipeline, tables;
    for_each_chunk([&](const ChunkOfHead& at) {
      if (tables.phase > 0) shared.tables_empty[tables.stage].wait(tables.phase - 1);
      Mbarrier& tables_full = shared.tables_full[tables.stage];
      tables_full.arrive_and_expect_tx(sizeof(DeltaRuleTables));
      cuda::tma_load(&shared.tables[tables.stage], &matrices_of_chunk(p, at.number, at.head)->tables, sizeof(DeltaRuleTables),
                     tables_full);
      tables.advance(Shared::kTables);
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        if (pipeline.phase > 0) shared.empty[pipeline.stage].wait(pipeline.phase - 1);
        auto& target = shared.stages[pipeline.stage];
        Mbarrier& full = shared.full[pipeline.stage];
        full.arrive_and_expect_tx(sizeof(target.states) + sizeof(target.grad_out));
        load_update_tile(&target.grad_out, p, p.grad_out_descriptor, p.grad_out_of_updates, block * kStateRows, at.head,
                         at.first(), static_cast<int>(at.batch), full);
        const BwdStatesOfChunk<columns>& states = *states_of_chunk<columns>(p, at.number, at.head, block);
        if constexpr (parts == 1) {
          cuda::tma_load(&target.states, &states, sizeof(target.states), full);
        } else {
          constexpr int kBytes = sizeof(BwdStatePart);
          const bool is_first = blockIdx.x % parts == 0;
          cuda::tma_load(&target.states, is_first ? static_cast<const void*>(&states) : second_part_of(p, &states), kBytes,
                         full);
          cuda::tma_load(&target.states.e, &states.e, sizeof(target.states) - kBytes, full);
        }
        pipeline.advance(Shared::kStages);
      }
    });
  }

  // Run by another thread than produce_stages(), so that later chunks' stages do not wait until q and k may be overwritten.
  __device__ __forceinline__ void produce_rows() {
    PipelineState rows;
    for_each_chunk([&](const ChunkOfHead& at) {
      const int key_head = grouped ? at.head / p.value_heads_per_key_head : at.head, batch = static_cast<int>(at.batch);
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

  // Run by the first consumer warpgroup: F, B, the gradients of beta and of log decays.
  __device__ __forceinline__ void consume_pairs() {
    const FragmentLane lane = FragmentLane::opaque_thread();
    const FragmentPairs<> pairs(lane);
    PipelineState pipeline, tables_at, rows;
    for_each_chunk([&](const ChunkOfHead& at) {
      shared.tables_full[tables_at.stage].wait(tables_at.phase);
      const DeltaRuleTables& tables = shared.tables[tables_at.stage];
      DecaySums& sums = shared.sums[tables_at.stage];
      float f[kStepBlocks][4], b[kStepBlocks][4];
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        auto& stage = wait_for_stage(pipeline, at);
        const uint64_t g_rows = make_operand(stage.grad_out), y_rows = make_operand(stage.states.y),
                       e_rows = make_operand(stage.states.e);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kStepGroups; ++k) {
          cuda::gemm<Scalar, false, true>(f, columns_of(g_rows, k), rows_of(e_rows, k), block > 0 || k > 0);
          cuda::gemm<Scalar, true, true>(b, rows_of(y_rows, k), rows_of(e_rows, k), block > 0 || k > 0);
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
      if (p.grad_beta.data != nullptr) {
        visit_warp(lane, [&](auto warp) { gradients.template write_beta<warp>(at, b, lane); });
      }
      apply_factors(f, b, tables, lane);
      if (rows.phase > 0) shared.pairs_empty.wait(rows.phase - 1);
      put(shared.f, f, pairs);
      put(shared.b, b, pairs);
      cuda::fence_proxy_async();
      shared.pairs_full.arrive();
      cuda::warpgroup_wait<0>(products);
      multiply(f, products);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::gemm<Scalar, false, false>(products, columns_of(k_rows, k), columns_of(k_rows, k), k > 0);
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(products);
      shared.rows_empty.arrive();
      multiply(b, products);
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[n][i] += b[n][i];
      }
      sum_pairs(f, sums.pairs[lane.warp], lane);
      shared.sums_full[tables_at.stage].arrive();
      if (lane.warp == 0) {
        shared.sums_full[tables_at.stage].wait(tables_at.phase);
        if (p.grad_log_decay.data != nullptr) write_grad_log_decay(p, p.grad_log_decay, at, sums, tables, lane);
      }
      shared.tables_empty[tables_at.stage].arrive();
      tables_at.advance(Shared::kTables);
      rows.advance(1);
    });
  }

  // Run by the second consumer warpgroup: the gradients of q and v.
  __device__ __forceinline__ void consume_queries() {
    const FragmentLane lane = FragmentLane::opaque_thread();
    const FragmentPairs<> pairs(lane);
    PipelineState pipeline, tables_at, rows;
    for_each_chunk([&](const ChunkOfHead& at) {
      shared.tables_full[tables_at.stage].wait(tables_at.phase);
      const DeltaRuleTables& tables = shared.tables[tables_at.stage];
      DecaySums& sums = shared.sums[tables_at.stage];
      float dq[kColumnBlocks][4];
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        auto& stage = wait_for_stage(pipeline, at);
        const uint64_t g_rows = make_operand(stage.grad_out), s_rows = make_operand(stage.states.s);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kStepGroups; ++k) {
          cuda::gemm<Scalar, false, true>(dq, columns_of(g_rows, k), rows_of(s_rows, k), block > 0 || k > 0);
        }
        cuda::warpgroup_commit();
        gradients.write_v(at, tables, stage.states.y, block, lane);
        cuda::warpgroup_wait<0>(dq);
        shared.empty[pipeline.stage].arrive();
        pipeline.advance(Shared::kStages);
      }
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
      write_rows(at, p.grad_q, dq, 0, shared.q, pairs, lane);
      tables_at.advance(Shared::kTables);
      rows.advance(1);
    });
  }

  // Run by the third consumer warpgroup: the gradient of k.
  __device__ __forceinline__ void consume_keys() {
    const FragmentLane lane = FragmentLane::opaque_thread();
    const FragmentPairs<> pairs(lane);
    PipelineState pipeline, tables_at, rows;
    for_each_chunk([&](const ChunkOfHead& at) {
      shared.tables_full[tables_at.stage].wait(tables_at.phase);
      const DeltaRuleTables& tables = shared.tables[tables_at.stage];
      DecaySums& sums = shared.sums[tables_at.stage];
      float dk[kColumnBlocks][4], added[kColumnBlocks][4], of_states = 0;
#pragma unroll 1
      for (int block = 0; block < blocks_of_rows(); ++block) {
        auto& stage = wait_for_stage(pipeline, at);
        const uint64_t y_rows = make_operand(stage.states.y), s_rows = make_operand(stage.states.s),
                       e_rows = make_operand(stage.states.e), d_rows = make_operand(stage.states.d);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kStepGroups; ++k) {
          const bool adds = block > 0 || k > 0;
          cuda::gemm<Scalar, true, true>(dk, rows_of(y_rows, k), rows_of(s_rows, k), adds);
          cuda::gemm<Scalar, true, true>(added, rows_of(e_rows, k), rows_of(d_rows, k), adds);
        }
        cuda::warpgroup_commit();
        of_states += dot(stage.states.s, stage.states.d);
        cuda::warpgroup_wait<0>(dk);
        cuda::warpgroup_wait<0>(added);
        shared.empty[pipeline.stage].arrive();
        pipeline.advance(Shared::kStages);
      }
      wait_for_rows(rows, at);
      of_states = warp_sum(of_states);
      if (lane.index == 0) sums.states[lane.warp] = of_states;
      add_scaled(dk, added, tables, sums, pairs, lane);
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
      write_rows(at, p.grad_k, dk, 1, shared.k, pairs, lane);
      tables_at.advance(Shared::kTables);
      rows.advance(1);
    });
  }

 private:
  // Writes the gradients of q or k, once this warpgroup reads no more of both tiles but its own. The host applies the norms to
  // fp32 rows.
  __device__ __forceinline__ void write_rows(const ChunkOfHead& at, const RowsView& view, float (&d)[kColumnBlocks][4],
                                             int index, SmemTile<columns>& tile, const FragmentPairs<>& pairs,
                                             const FragmentLane& lane) {
    const bool is_normalized = p.row_factors.data != nullptr && !p.has_fp32_rows;
    if (!is_normalized) shared.rows_empty.arrive();
    gradients.write_rows(at, view, d, index, lane, [&] {
      if (is_normalized) apply_norm(d, tile, pairs);
    });
    if (is_normalized) shared.rows_empty.arrive();
  }
  // Makes gradients of rows of those of normalized rows. Of a row x with the factor r, d is r times the latter, and
  // d - r^2 x (x . d) the former.
  static __device__ __forceinline__ void apply_norm(float (&d)[kColumnBlocks][4], SmemTile<columns>& tile,
                                                    const FragmentPairs<>& pairs) {
    constexpr auto kEpsilon = static_cast<float>(kNormEpsilon);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float squares = 0, along = 0;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 row = cuda::unpack<Scalar>(pairs.at(tile, n, half));
        squares = fmaf(row.x, row.x, fmaf(row.y, row.y, squares));
        along = fmaf(row.x, d[n][2 * half], fmaf(row.y, d[n][2 * half + 1], along));
      }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        squares += __shfl_xor_sync(kAllLanes, squares, distance);
        along += __shfl_xor_sync(kAllLanes, along, distance);
      }
      const float of_row = -along / (squares + kEpsilon);
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 row = cuda::unpack<Scalar>(pairs.at(tile, n, half));
        d[n][2 * half] = fmaf(of_row, row.x, d[n][2 * half]);
        d[n][2 * half + 1] = fmaf(of_row, row.y, d[n][2 * half + 1]);
      }
    }
  }

  // F and B of g E^T and Y E^T: products with factors of rows and columns, zero above the diagonal. An exponent of two steps is
  // split at the warp's first row left of the diagonal blocks, as in apply_decays() (step_pairs.cuh). There all warps run the
  // same code: to fetch code of their own takes longer than the work.
  __device__ __forceinline__ void apply_factors(float (&f)[kStepBlocks][4], float (&b)[kStepBlocks][4],
                                                const DeltaRuleTables& tables, const FragmentLane& lane) const {
    const float log2_of_first = tables.log2_cumsum[lane.row - lane.quad];
    float log2_of_row[2], f_factors[2], b_factors[2], decays[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      log2_of_row[half] = tables.log2_cumsum[row];
      decays[half] = Math<float>::exp2(log2_of_row[half] - log2_of_first);
      f_factors[half] = tables.query_factor[row];
      b_factors[half] = -key_row_factor(tables, row, tables.beta[row]);
    }
#pragma unroll
    for (int n = 0; n < kStepBlocks - 2; ++n) {
      if (n >= 2 * lane.warp) break;
      const float2 log2 = column_pair(tables.log2_cumsum, n, lane), beta = column_pair(tables.beta, n, lane);
      const float of_columns[2] = {beta.x * Math<float>::exp2(log2_of_first - log2.x),
                                   beta.y * Math<float>::exp2(log2_of_first - log2.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f[n][i] *= f_factors[i / 2] * (decays[i / 2] * of_columns[i % 2]);
        b[n][i] *= b_factors[i / 2] * (decays[i / 2] * of_columns[i % 2]);
      }
    }
    float factors[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 log2 = column_pair(tables.log2_cumsum, 2 * lane.warp + n, lane),
                   beta = column_pair(tables.beta, 2 * lane.warp + n, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int distance = lane.quad + 8 * (i / 2) - (kBlockSteps * n + 2 * lane.pair + i % 2);
        // Above the diagonal the decay may be Inf: it is selected.
        const float decay = Math<float>::exp2(log2_of_row[i / 2] - (i % 2 == 0 ? log2.x : log2.y));
        factors[n][i] = distance >= 0 ? (i % 2 == 0 ? beta.x : beta.y) * decay : 0.0f;
      }
    }
    visit_warp(lane, [&](auto warp) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int distance = lane.quad + 8 * (i / 2) - (kBlockSteps * n + 2 * lane.pair + i % 2);
          float &of_f = f[2 * warp + n][i], &of_b = b[2 * warp + n][i];
          of_f = distance >= 0 ? of_f * (f_factors[i / 2] * factors[n][i]) : 0.0f;
          of_b = distance > 0 ? of_b * (b_factors[i / 2] * factors[n][i]) : 0.0f;
        }
      }
#pragma unroll
      for (int n = 2 * warp + 2; n < kStepBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[n][i] = b[n][i] = 0;
      }
    });
    if (!has_reset(p, tables)) return;
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kBlockSteps * n + 2 * lane.pair + i % 2 < tables.first[lane.row + 8 * (i / 2)]) f[n][i] = b[n][i] = 0;
      }
    }
  }
  // Elements that are zero stay zero.
  static __device__ __forceinline__ void multiply(float (&d)[kStepBlocks][4], const float (&by)[kStepBlocks][4]) {
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] = d[n][i] == 0.0f ? 0.0f : d[n][i] * by[n][i];
    }
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
      const float beta = tables.beta[row], of_reads = -beta * tables.exp_cumsum[row],
                  of_adds = beta * tables.gain_to_chunk_end[row];
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 key = cuda::unpack<Scalar>(pairs.at(shared.k, n, half));
        float &low = reads[n][2 * half], &high = reads[n][2 * half + 1];
        low *= of_reads;
        high *= of_reads;
        const float added_low = of_adds * adds[n][2 * half], added_high = of_adds * adds[n][2 * half + 1];
        sum_of_reads[half] = fmaf(low, key.x, fmaf(high, key.y, sum_of_reads[half]));
        sum_of_adds[half] = fmaf(added_low, key.x, fmaf(added_high, key.y, sum_of_adds[half]));
        low += added_low;
        high += added_high;
      }
    }
    put_row_sums(sum_of_reads, sums.reads[1], lane);
    put_row_sums(sum_of_adds, sums.adds, lane);
  }
  // This thread's share of <S, D>.
  static __device__ __forceinline__ float dot(const SmemTile<columns>& s, const SmemTile<columns>& d) {
    constexpr int kVectors = sizeof(SmemTile<columns>) / sizeof(uint4);
    const auto *s_vectors = reinterpret_cast<const uint4*>(&s), *d_vectors = reinterpret_cast<const uint4*>(&d);
    float sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x % kWarpgroupThreads; i < kVectors; i += kWarpgroupThreads) {
      const uint4 s_vector = s_vectors[i], d_vector = d_vectors[i];
      const uint32_t s_words[4] = {s_vector.x, s_vector.y, s_vector.z, s_vector.w},
                     d_words[4] = {d_vector.x, d_vector.y, d_vector.z, d_vector.w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 s_pair = cuda::unpack<Scalar>(s_words[word]), d_pair = cuda::unpack<Scalar>(d_words[word]);
        sum = fmaf(s_pair.x, d_pair.x, fmaf(s_pair.y, d_pair.y, sum));
      }
    }
    return sum;
  }
};

template <typename Scalar, int columns, bool grouped>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdChunks<Scalar, columns, grouped>::kThreads : kWarpSize, 1)
    delta_rule_bwd_chunks_kernel(const __grid_constant__ DeltaRuleBwdParams p) {
#if SSM_KERNELS_HAS_WGMMA
  using Chunks = BwdChunks<Scalar, columns, grouped>;
  extern __shared__ unsigned char unaligned_memory[];
  Chunks{p, align_shared<typename Chunks::Shared>(unaligned_memory)}.run();
#endif
}

template <typename Scalar, bool grouped>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdChunks<Scalar, kStateColumns, grouped>::kThreads : kWarpSize, 1)
    delta_rule_bwd_wide_chunks_kernel(const __grid_constant__ DeltaRuleBwdParts p) {
#if SSM_KERNELS_HAS_WGMMA
  using Chunks = BwdChunks<Scalar, kStateColumns, grouped, kColumnParts>;
  extern __shared__ unsigned char unaligned_memory[];
  Chunks{p.of[blockIdx.x % kColumnParts], align_shared<typename Chunks::Shared>(unaligned_memory)}.run();
#endif
}

}  // namespace ssm_kernels::delta_rule
