// The chains over time of the delta rule's backward with wgmma: the states S and their gradients D before and after each chunk,
// and with them what each step adds to the state and its gradient. S is V x K; s is the cumulative sum of log decays from the
// chunk's start, l its last step, N and P are those of bwd_matrices.cuh, g the gradient of out. Forward in time
//
//   R^T = V^T - (S K^T) e^(s_i)          E^T = R^T + (R^T diag(beta)) N^T       what S predicts wrongly at each step
//   S  <- e^(s_l) S + (beta_j e^(s_l - s_j) E_j)^T K
//
// and backward in time, with D the gradient of the state after the chunk,
//
//   dU^T = g^T P + (D K^T) e^(s_l - s_j)          Y^T = dU^T + (dU^T diag(beta)) N
//   D  <- e^(s_l) D + scale (e^(s_i) g_i)^T Q - (e^(s_j) beta_j Y_j)^T K
//
// D does not need S: half of the blocks, the first ones, go forward and the others backward. E is without the factor beta of
// U = diag(beta) E, what steps add to the state, and Y without that of the gradient of v, diag(beta) Y: the gradient of beta is
// Y . E. The identity in the inverse I + diag(beta) N does not round R or dU; N multiplies a hi/lo split of these, and a hi/lo
// split of U is added to S, because for correlated keys the roundings would make most of the errors of the gradients.
//
// A block has a pair of blocks of 64 rows of V of one head and one sequence. Two consumer warpgroups hold 64 rows of S or D
// each, as accumulators, from which no value of the chain moves: each is the operand A of the next product; K, Q, N and P are
// operands B in shared memory, which a thread fills by TMA. With makes_pairs each warpgroup computes half of the columns of P,
// which then does not go through memory: a block takes longer for a chunk, and all together less if each multiprocessor has
// one. S, D, E and Y go to memory, once rounded, for bwd_chunks.cuh.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/chunked/state.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"
#include "delta_rule/cuda/step_tiles.cuh"

namespace ssm_kernels::delta_rule {

template <int columns>
struct BwdStatesShared {
  static constexpr int kStages = 2;
  struct alignas(kOperandAlignment) Stage {
    SmemTile<columns> k, q;                  // q backward in time alone, as p
    SmemTile<kStateRows> rows[kWarpgroups];  // of v or g
    BwdMatricesOfChunk matrices;
  };
  Stage stages[kStages];
  // S or D, and E^T or Y^T, on their way to memory. E^T and Y^T have two places in turn, so that S and D need not wait until
  // TMA has read them.
  SmemTile<columns> states[kWarpgroups];
  SmemTile<kChunk> steps[2][kWarpgroups];
  Mbarrier full[kStages], empty[kStages];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdStatesShared)); }
};

// With has_updates Q, g and P have fewer rows (step_tiles.cuh).
template <typename Scalar, int columns, bool makes_pairs, bool has_updates>
struct BwdStates {
  static_assert(!makes_pairs || !has_updates, "P of rows of q is made by the kernel before");
  using Shared = BwdStatesShared<columns>;
  using Stage = typename Shared::Stage;
  using TileState = State<columns>;
  static constexpr int kStateGroups = columns / 16, kTileColumns = 64;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads, kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kConsumerBarrier = kPartialOutIsRead + 1;

  const DeltaRuleBwdParams& p;
  const WorkPartition& partition;
  Shared& shared;
  const WorkSpan& at;
  const bool is_reverse;

  // Run by all threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x < kWarpgroupThreads) clear_rows();
    if (threadIdx.x >= Shared::kStages) return;
    shared.full[threadIdx.x].init(1);
    shared.empty[threadIdx.x].init(kConsumerThreads);
  }
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? at.chunks - 1 - position : position; }
  __device__ __forceinline__ int64_t chunk_number(int chunk) const { return first_chunk_index(p, at.entry) + chunk; }

  // Run by one thread.
  __device__ __forceinline__ void produce() {
    const int head = at.group, key_head = head / p.value_heads_per_key_head, batch = static_cast<int>(at.batch),
              first_row = StateTile(p, partition, at, 0).first_row;
    PipelineState pipeline;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      if (pipeline.phase > 0) shared.empty[pipeline.stage].wait(pipeline.phase - 1);
      Stage& target = shared.stages[pipeline.stage];
      Mbarrier& full = shared.full[pipeline.stage];
      const int chunk = chunk_at(position), step = static_cast<int>(at.start) + chunk * kChunk;
      const BwdMatricesOfChunk& source = *matrices_of_chunk(p, chunk_number(chunk), head);
      BwdMatricesOfChunk& matrices = target.matrices;
      const int shift = has_updates ? p.log2_updates : 0, row = step >> shift;  // of q and g
      constexpr int kBytes = sizeof(target.k) + sizeof(matrices.n) + sizeof(matrices.tables),
                    kQueryBytes = sizeof(target.q) + sizeof(target.rows);
      full.arrive_and_expect_tx(kBytes + (is_reverse
                                              ? (kQueryBytes >> shift) + (makes_pairs ? 0 : query_matrix_bytes(has_updates))
                                              : sizeof(target.rows)));
      const auto load_columns = [&](SmemTile<columns>& tile, const cuda::TmaDescriptor& descriptor, int first) {
#pragma unroll
        for (int panel = 0; panel < columns / kTileColumns; ++panel) {
          cuda::tma_load_tile(&tile.panels[panel], descriptor, panel * kTileColumns, key_head, first, batch, full);
        }
      };
      load_columns(target.k, p.k_descriptor, step);
      for (int i = 0; i < kWarpgroups; ++i) {
        cuda::tma_load_tile(&target.rows[i], is_reverse ? p.grad_out_descriptor : p.v_descriptor, first_row + i * kStateRows,
                            head, is_reverse ? row : step, batch, full);
      }
      cuda::tma_load(&matrices.tables, &source.tables, sizeof(source.tables), full);
      cuda::tma_load(&matrices.n, &source.n, sizeof(source.n), full);
      if (is_reverse) {
        if constexpr (!makes_pairs) cuda::tma_load(&matrices.p, &source.p, query_matrix_bytes(has_updates), full);
        load_columns(target.q, p.q_descriptor, row);
      }
      pipeline.advance(Shared::kStages);
    }
  }

  // Run by a consumer warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const FragmentLane lane = FragmentLane::opaque_thread();
    const StateTile state_tile(p, partition, at, index);
    TileState state;
    state.load(p, states_of(p, is_reverse ? p.grad_final_states : p.initial_states, at.entry), state_tile, lane);
    if (is_reverse) {
      scan<true>(state, state_tile, index, lane);
      if (p.grad_initial_states != nullptr) {
        state.store(p, states_of(p, p.grad_initial_states, at.entry), state_tile, lane);
      }
    } else {
      scan<false>(state, state_tile, index, lane);
      if (p.final_states != nullptr) state.store(p, states_of(p, p.final_states, at.entry), state_tile, lane);
    }
  }

  // Run by one warpgroup. Clears the rows of Q and g that products have and no load writes.
  __device__ __forceinline__ void clear_rows() {
    if constexpr (has_updates) {
      const int rows = rows_of_updates(p, kChunk);
      if (rows == kChunkRows<has_updates>) return;
      for (Stage& stage : shared.stages) {
        clear_steps(stage.q.panels, rows);
        for (auto& tile : stage.rows) clear_steps(tile.panels, rows);
      }
    }
  }

 private:
  template <bool backward>
  __device__ __forceinline__ void scan(TileState& state, const StateTile& state_tile, int index, const FragmentLane& lane) {
    PipelineState pipeline;
    const FragmentPairs<> pairs(lane);
    const bool has_workspace = p.states != nullptr;
    // V^T or g^T has this many rows and groups of 16 columns.
    constexpr bool kHasFewRows = backward && has_updates;
    constexpr int kRowGroups = kChunkRows<kHasFewRows> / 16;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      const int chunk = chunk_at(position);
      shared.full[pipeline.stage].wait(pipeline.phase);
      Stage& stage = shared.stages[pipeline.stage];
      const DeltaRuleTables& tables = stage.matrices.tables;
      if (is_packed(p) && at.steps_of(chunk) < kChunk) {
        const int steps = at.steps_of(chunk), rows = backward && has_updates ? rows_of_updates(p, steps) : steps;
        clear_steps(stage.k.panels, steps);
        if (backward) clear_steps(stage.q.panels, rows);
        clear_steps(stage.rows[index].panels, rows);
        cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
      }
      const uint64_t k_rows = make_operand(stage.k), q_rows = make_operand(stage.q), n_rows = make_operand(stage.matrices.n),
                     p_rows = make_operand(stage.matrices.p);
      BwdStatesOfChunk<columns>& target =
          *states_of_chunk<columns>(p, chunk_number(chunk), at.group, state_tile.first_row / kStateRows);

      uint32_t s[kStateGroups][4], x[kRowGroups][4];
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
#pragma unroll
      for (int j = 0; j < kRowGroups; ++j) {
        cuda::ldmatrix_transposed(x[j], stage.rows[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
      }
      float u[kStepBlocks][4], y[kStepBlocks][4], of_pairs[kStepBlocks / 2][4];
      cuda::warpgroup_arrive();
      if constexpr (backward && makes_pairs) {
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) {
          cuda::gemm<Scalar, false, false>(of_pairs, columns_of(q_rows, k), columns_of(rows_of(k_rows, 2 * index), k), k > 0);
        }
        cuda::warpgroup_commit();
      }
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) cuda::gemm<Scalar, false>(u, s[k], columns_of(k_rows, k), k > 0);
      if constexpr (backward) {
        if constexpr (makes_pairs) {
          cuda::warpgroup_commit();
          cuda::warpgroup_wait<1>(of_pairs);
          put_pairs(of_pairs, stage.matrices.p, tables, index, pairs, lane);
          cuda::fence_proxy_async();
          cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
          cuda::warpgroup_arrive();
        }
#pragma unroll
        for (int i = 0; i < kRowGroups; ++i) cuda::gemm<Scalar, true>(y, x[i], rows_of(p_rows, i), i > 0);
      }
      cuda::warpgroup_commit();
      if (has_workspace) {
#pragma unroll
        for (int k = 0; k < kStateGroups; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs.at(shared.states[index], 2 * k + i / 2, i % 2) = s[k][i];
        }
        send(backward ? target.d : target.s, shared.states[index], state_tile, index);
      }
      cuda::warpgroup_wait<0>(u);
      if constexpr (backward) cuda::warpgroup_wait<0>(y);

      // u becomes R^T or dU^T; the next product's operand is that times beta, in a hi/lo split.
      uint32_t scaled[kStepGroups][4], scaled_lo[kStepGroups][4];
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        const float2 decay = column_pair(backward ? tables.gain_to_chunk_end : tables.exp_cumsum, n, lane),
                     beta = column_pair(tables.beta, n, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &low = u[n][2 * half], &high = u[n][2 * half + 1];
          if constexpr (backward) {
            low = fmaf(decay.x, low, y[n][2 * half]);
            high = fmaf(decay.y, high, y[n][2 * half + 1]);
          } else {
            const float2 v = cuda::unpack<Scalar>(x[n / 2][n % 2 * 2 + half]);
            low = fmaf(-decay.x, low, v.x);
            high = fmaf(-decay.y, high, v.y);
          }
          uint32_t& rounded = scaled[n / 2][n % 2 * 2 + half];
          rounded = cuda::pack<Scalar>(beta.x * low, beta.y * high);
          scaled_lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(beta.x * low, beta.y * high, rounded);
        }
      }
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        if constexpr (backward) {
          cuda::gemm<Scalar, false>(u, scaled[j], columns_of(n_rows, j), true);
          cuda::gemm<Scalar, false>(u, scaled_lo[j], columns_of(n_rows, j), true);
        } else {
          cuda::gemm<Scalar, true>(u, scaled[j], rows_of(n_rows, j), true);
          cuda::gemm<Scalar, true>(u, scaled_lo[j], rows_of(n_rows, j), true);
        }
      }
      cuda::warpgroup_commit();
      if constexpr (backward) {
#pragma unroll
        for (int n = 0; n < 2 * kRowGroups; ++n) {
          const float2 decay = query_pair<has_updates>(p, tables.query_decay, n, lane);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& pair = x[n / 2][n % 2 * 2 + half];
            const float2 g = cuda::unpack<Scalar>(pair);
            pair = cuda::pack<Scalar>(decay.x * g.x, decay.y * g.y);
          }
        }
      }
      state.decay(tables.chunk_decay);
      const bool keeps_state = !has_reset(p, tables);
      cuda::warpgroup_wait<0>(u);

      // The chunk adds E or Y, scaled by the steps' factors, to the state. Forward in time the operand is a hi/lo split.
      uint32_t added[kStepGroups][4], added_lo[kStepGroups][4];
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        float2 factor = column_pair(backward ? tables.exp_cumsum : tables.gain_to_chunk_end, n, lane);
        const float2 beta = column_pair(tables.beta, n, lane);
        factor.x *= backward ? -beta.x : beta.x;
        factor.y *= backward ? -beta.y : beta.y;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = factor.x * u[n][2 * half], high = factor.y * u[n][2 * half + 1];
          uint32_t& rounded = added[n / 2][n % 2 * 2 + half];
          rounded = cuda::pack<Scalar>(low, high);
          if constexpr (!backward) added_lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(low, high, rounded);
        }
      }
      cuda::warpgroup_arrive();
      if constexpr (backward) {
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
          cuda::gemm<Scalar, true>(state.values, x[j], rows_of(q_rows, j), j > 0 || keeps_state);
        }
      }
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, true>(state.values, added[j], rows_of(k_rows, j), backward || j > 0 || keeps_state);
        if constexpr (!backward) cuda::gemm<Scalar, true>(state.values, added_lo[j], rows_of(k_rows, j), true);
      }
      cuda::warpgroup_commit();
      if (has_workspace) {
        auto& steps = shared.steps[position % 2][index];
#pragma unroll
        for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            pairs.at(steps, n, half) = cuda::pack<Scalar>(u[n][2 * half], u[n][2 * half + 1]);
          }
        }
        // TMA has read the tile of the state, and the steps of the chunk before: both are overwritten next.
        cuda::tma_store_wait_read<0>();
        send(backward ? target.y : target.e, steps, state_tile, index);
      }
      cuda::warpgroup_wait<0>(state.values);
      shared.empty[pipeline.stage].arrive();
      pipeline.advance(Shared::kStages);
    }
    cuda::tma_store_wait_read<0>();
  }

  // Puts this warpgroup's half of the columns of P. No branch: products are in flight.
  static __device__ __forceinline__ void put_pairs(const float (&products)[kStepBlocks / 2][4], SmemTile<kChunk>& target,
                                                   const DeltaRuleTables& tables, int index, const FragmentPairs<>& pairs,
                                                   const FragmentLane& lane) {
    const FragmentPairs<> half_pairs = pairs.moved(index * (kStepBlocks / 2));
    float log2_of_row[2], factors[2];
    int first[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      log2_of_row[half] = tables.log2_cumsum[row];
      factors[half] = tables.query_factor[row];
      first[half] = tables.first[row];
    }
#pragma unroll
    for (int n = 0; n < kStepBlocks / 2; ++n) {
      const int block = index * (kStepBlocks / 2) + n;
      const float2 log2 = column_pair(tables.log2_cumsum, block, lane);
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = kBlockSteps * block + 2 * lane.pair + i % 2, row = lane.row + 8 * (i / 2);
        // Above the diagonal the decay may be Inf: it is selected.
        const float decay = factors[i / 2] * Math<float>::exp2(log2_of_row[i / 2] - (i % 2 == 0 ? log2.x : log2.y));
        values[i] = column <= row && column >= first[i / 2] ? decay * products[n][i] : 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        half_pairs.at(target, n, half) = cuda::pack<Scalar>(values[2 * half], values[2 * half + 1]);
      }
    }
  }
  // Starts the copy of a tile that the warpgroup has written.
  template <typename Tile>
  static __device__ __forceinline__ void send(Tile& target, const Tile& tile, const StateTile& state_tile, int index) {
    cuda::fence_proxy_async();
    sync_warpgroup(index);
    cuda::tma_store(&target, &tile, sizeof(tile), threadIdx.x % kWarpgroupThreads == 0 && state_tile.is_there());
  }
};

template <typename Scalar, int columns, bool makes_pairs, bool has_updates>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdStates<Scalar, columns, makes_pairs, has_updates>::kThreads
                                                        : kWarpSize,
                                  1) delta_rule_bwd_states_kernel(const __grid_constant__ DeltaRuleBwdParams p,
                                                                  const __grid_constant__ WorkPartition partition) {
#if SSM_KERNELS_HAS_WGMMA
  run_states<BwdStates<Scalar, columns, makes_pairs, has_updates>>(p, partition);
#endif
}

}  // namespace ssm_kernels::delta_rule
