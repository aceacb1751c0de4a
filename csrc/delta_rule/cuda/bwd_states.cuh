// The chains over time of the delta rule's backward with wgmma: the states S and their gradients D before and after each chunk,
// and with them what each step adds to the state and its gradient. S is V x K; s is the cumulative sum of log decays from the
// chunk's start, l its last step, N is that of bwd_matrices.cuh, P = scale (Q K^T G), with G(i, j) = e^(s_i - s_j) for j <= i,
// and g the gradient of out. Forward in time
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
// operands B in shared memory. A thread fills it by TMA, but for P, which a third warpgroup computes from K and Q, ahead of the
// chain. S, D, E and the gradients of v go to memory, once rounded, for bwd_chunks.cuh.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/chunked/state.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_low_bits.cuh"
#include "delta_rule/cuda/bwd_value_gradients.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"
#include "delta_rule/cuda/step_tiles.cuh"

namespace ssm_kernels::delta_rule {

template <int columns>
struct BwdStatesShared {
  static constexpr int kStages = 2;
  struct alignas(kOperandAlignment) Stage {
    SmemTile<columns> k, q;                  // q backward in time alone
    SmemTile<kStateRows> rows[kWarpgroups];  // of v or g
    BwdMatricesOfChunk matrices;
  };
  Stage stages[kStages];
  SmemTile<kChunk> p[kStages];  // rows are steps i
  // S or D, and E^T or the gradients of v, on their way to memory. The latter have two places in turn, so that S and D need not
  // wait until TMA has read them.
  SmemTile<columns> states[kWarpgroups];
  SmemTile<kChunk> steps[2][kWarpgroups];
  Mbarrier full[kStages], empty[kStages], pairs_full[kStages];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdStatesShared)); }
};

// With has_updates Q, g and P have fewer rows (step_tiles.cuh).
template <typename Scalar, int columns, bool has_updates>
struct BwdStates {
  using Shared = BwdStatesShared<columns>;
  using Stage = typename Shared::Stage;
  using TileState = State<columns>;
  static constexpr int kStateGroups = columns / 16, kTileColumns = 64;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads, kThreads = kConsumerThreads + 2 * kWarpgroupThreads;
  static constexpr int kConsumerRegisters = 208, kMatrixRegisters = 72, kProducerRegisters = 24;
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
    shared.pairs_full[threadIdx.x].init(kWarpgroupThreads);
  }
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? at.chunks - 1 - position : position; }
  __device__ __forceinline__ int64_t chunk_number(int chunk) const { return first_chunk_index(p, at.entry) + chunk; }

  // Run by a warpgroup, of which one thread loads.
  __device__ __forceinline__ void produce() {
    if (threadIdx.x % kWarpgroupThreads != 0) return;
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
      full.arrive_and_expect_tx(kBytes + (is_reverse ? kQueryBytes >> shift : sizeof(target.rows)));
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
      if (is_reverse) load_columns(target.q, p.q_descriptor, row);
      pipeline.advance(Shared::kStages);
    }
  }

  // Run by a warpgroup, which works backward in time alone: P of each chunk. Steps after the end of a packed sequence have
  // zeros.
  __device__ __forceinline__ void make_matrices() {
    if (!is_reverse) return;
    const FragmentLane lane = FragmentLane::opaque_thread();
    const FragmentPairs<> pairs(lane);
    PipelineState pipeline;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      const int steps = at.steps_of(chunk_at(position));
      shared.full[pipeline.stage].wait(pipeline.phase);
      const Stage& stage = shared.stages[pipeline.stage];
      if constexpr (has_updates) {
        make_query_matrix<Scalar>(p, stage.q, stage.k, stage.matrices.tables, shared.p[pipeline.stage], steps, lane);
      } else {
        float products[kStepBlocks][4];
        multiply_by_keys<Scalar>(stage.q, stage.k, products);
        put_pairs(products, shared.p[pipeline.stage], stage.matrices.tables, steps, pairs, lane);
      }
      cuda::fence_proxy_async();
      shared.pairs_full[pipeline.stage].arrive();
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
    const ValueGradients<Scalar> value_gradients{p, state_tile, index, lane};
    const bool has_workspace = p.states != nullptr;
    // V^T or g^T has this many rows and groups of 16 columns.
    constexpr bool kHasFewRows = backward && has_updates;
    constexpr int kRowGroups = kChunkRows<kHasFewRows> / 16;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      const int chunk = chunk_at(position);
      shared.full[pipeline.stage].wait(pipeline.phase);
      Stage& stage = shared.stages[pipeline.stage];
      const BwdTables& tables = stage.matrices.tables;
      const bool is_cut = is_packed(p) && at.steps_of(chunk) < kChunk;
      if (is_cut) {
        const int steps = at.steps_of(chunk), rows = backward && has_updates ? rows_of_updates(p, steps) : steps;
        clear_steps(stage.k.panels, steps);
        if (backward) clear_steps(stage.q.panels, rows);
        clear_steps(stage.rows[index].panels, rows);
        cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
      }
      const uint64_t k_rows = make_operand(stage.k), q_rows = make_operand(stage.q), n_rows = make_operand(stage.matrices.n),
                     p_rows = make_operand(shared.p[pipeline.stage]);
      BwdStatesOfChunk<columns>& target =
          *states_of_chunk<columns>(p, chunk_number(chunk), at.group, state_tile.first_row / kStateRows);

      uint32_t s[kStateGroups][4], x[kRowGroups][4];
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
#pragma unroll
      for (int j = 0; j < kRowGroups; ++j) {
        cuda::ldmatrix_transposed(x[j], stage.rows[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
      }
      float u[kStepBlocks][4], y[kStepBlocks][4];
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) cuda::gemm<Scalar, false>(u, s[k], columns_of(k_rows, k), k > 0);
      cuda::warpgroup_commit();
      if constexpr (backward) {
        shared.pairs_full[pipeline.stage].wait(pipeline.phase);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kRowGroups; ++i) cuda::gemm<Scalar, true>(y, x[i], rows_of(p_rows, i), i > 0);
        cuda::warpgroup_commit();
      }
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
      auto& steps = shared.steps[position % 2][index];
      if constexpr (backward) {
        if (has_workspace && (is_cut || tables.has_small_beta)) {
          if (is_cut) value_gradients.write_cut(steps, u, tables, at, chunk);
          auto& other = shared.steps[(position + 1) % 2][index];
          if (tables.has_small_beta) value_gradients.write_undivided(target.y, other, u, pairs);
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
        if constexpr (backward) {
          value_gradients.put(steps, u, tables);
        } else {
#pragma unroll
          for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              pairs.at(steps, n, half) = cuda::pack<Scalar>(u[n][2 * half], u[n][2 * half + 1]);
            }
          }
          if constexpr (kHasLowBits<Scalar>) {
            const uint4 low_bits = pack_low_bits(u);
            if (state_tile.is_there()) target.low_bits[threadIdx.x % kWarpgroupThreads] = low_bits;
          }
        }
        // TMA has read the tile of the state, and the steps of the chunk before: both are overwritten next.
        cuda::tma_store_wait_read<0>();
        if constexpr (backward) {
          value_gradients.send(steps, at, chunk, publish(state_tile, index) && !is_cut);
        } else {
          send(target.e, steps, state_tile, index);
        }
      }
      cuda::warpgroup_wait<0>(state.values);
      shared.empty[pipeline.stage].arrive();
      pipeline.advance(Shared::kStages);
    }
    cuda::tma_store_wait_read<0>();
  }

  static __device__ __forceinline__ void put_pairs(const float (&products)[kStepBlocks][4], SmemTile<kChunk>& target,
                                                   const DeltaRuleTables& tables, int steps, const FragmentPairs<>& pairs,
                                                   const FragmentLane& lane) {
    float log2_of_row[2], factors[2];
    int first[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      log2_of_row[half] = tables.log2_cumsum[row];
      factors[half] = tables.query_factor[row];
      first[half] = row < steps ? tables.first[row] : kChunk;
    }
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
      const float2 log2 = column_pair(tables.log2_cumsum, n, lane);
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = kBlockSteps * n + 2 * lane.pair + i % 2, row = lane.row + 8 * (i / 2);
        // Above the diagonal the decay may be Inf: it is selected.
        const float decay = factors[i / 2] * Math<float>::exp2(log2_of_row[i / 2] - (i % 2 == 0 ? log2.x : log2.y));
        values[i] = column <= row && column >= first[i / 2] ? decay * products[n][i] : 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pairs.at(target, n, half) = cuda::pack<Scalar>(values[2 * half], values[2 * half + 1]);
      }
    }
  }
  // Publishes a tile that the warpgroup has written. Returns whether this thread starts the copy.
  static __device__ __forceinline__ bool publish(const StateTile& state_tile, int index) {
    cuda::fence_proxy_async();
    sync_warpgroup(index);
    return threadIdx.x % kWarpgroupThreads == 0 && state_tile.is_there();
  }
  template <typename Tile>
  static __device__ __forceinline__ void send(Tile& target, const Tile& tile, const StateTile& state_tile, int index) {
    const bool starts = publish(state_tile, index);
    cuda::tma_store(&target, &tile, sizeof(tile), starts);
  }
};

template <typename Scalar, int columns, bool has_updates>
constexpr bool kHasMatrixWarpgroup<BwdStates<Scalar, columns, has_updates>> = true;

template <typename Scalar, int columns, bool has_updates>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdStates<Scalar, columns, has_updates>::kThreads : kWarpSize, 1)
    delta_rule_bwd_states_kernel(const __grid_constant__ DeltaRuleBwdParams p,
                                 const __grid_constant__ WorkPartition partition) {
#if SSM_KERNELS_HAS_WGMMA
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  run_states<BwdStates<Scalar, columns, has_updates>>(p, partition);
#endif
}

}  // namespace ssm_kernels::delta_rule
