// The chains over time of the delta rule's backward for keys of 129 to 256 columns (wide_state.cuh): the recurrences of
// bwd_states.cuh, whose notation this file shares. N is a hi/lo split, too.
//
// S and D leave in two parts of kStateColumns columns, which different blocks of bwd_chunks.cuh read.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_low_bits.cuh"
#include "delta_rule/cuda/bwd_value_gradients.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"
#include "delta_rule/cuda/wide_state.cuh"

namespace ssm_kernels::delta_rule {

struct BwdWideStatesShared {
  static constexpr int kStages = 2;
  SmemTile<kWideColumns> k[kStages], q;    // q backward in time alone, as p
  SmemTile<kStateRows> rows[kWarpgroups];  // of v or g
  SmemTile<kChunk> n, n_lo, p;
  SmemTile<kWideColumns> states[kWarpgroups];  // S or D on their way to memory
  SmemTile<kChunk> steps[kWarpgroups];         // E^T or the gradients of v
  BwdTables tables[kStages];
  TmaBuffer<kStages> keys;  // of k and tables
  TmaBuffer<1> queries, values, inverse, pairs;

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdWideStatesShared)); }
};

template <typename Scalar>
struct BwdWideStates {
  using Shared = BwdWideStatesShared;
  using TileState = State<kWideColumns>;
  using StatesOfChunk = BwdStatesOfChunk<kStateColumns>;
  static constexpr int kThreads = kConsumerThreadsOfBlock + kWarpgroupThreads;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

  const DeltaRuleBwdParams& p;
  const WorkPartition& partition;
  Shared& shared;
  const WorkSpan& at;
  const bool is_reverse;

  // Run by all threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x != 0) return;
    shared.keys.init();
    shared.queries.init();
    shared.values.init();
    shared.inverse.init();
    shared.pairs.init();
  }
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? at.chunks - 1 - position : position; }
  __device__ __forceinline__ int64_t chunk_number(int chunk) const { return first_chunk_index(p, at.entry) + chunk; }

  // Run by one thread. Loads are in the order in which consumers release their places.
  __device__ __forceinline__ void produce() {
    const int head = at.group, key_head = head / p.value_heads_per_key_head, batch = static_cast<int>(at.batch),
              first_row = StateTile(p, partition, at, 0).first_row;
#pragma unroll 1
    for (int use = 0; use < at.chunks; ++use) {
      const int stage = use % Shared::kStages, chunk = chunk_at(use), step = static_cast<int>(at.start) + chunk * kChunk;
      const auto& matrices = *matrices_of_chunk(p, chunk_number(chunk), head);
      const auto& wide = *wide_matrices_of_chunk(p, chunk_number(chunk), head);
      Mbarrier& keys_full = shared.keys.expect(use, sizeof(shared.k[0]) + sizeof(BwdTables));
      load_wide_rows(shared.k[stage], p.k_descriptor, key_head, step, batch, keys_full);
      cuda::tma_load(&shared.tables[stage], &matrices.tables, sizeof(BwdTables), keys_full);
      if (is_reverse) cuda::tma_load(&shared.p, &wide.p, sizeof(shared.p), shared.pairs.expect(use, sizeof(shared.p)));
      const auto load_values = [&] {
        Mbarrier& values_full = shared.values.expect(use, sizeof(shared.rows));
#pragma unroll
        for (int i = 0; i < kWarpgroups; ++i) {
          cuda::tma_load_tile(&shared.rows[i], is_reverse ? p.grad_out_descriptor : p.v_descriptor, first_row + i * kStateRows,
                              head, step, batch, values_full);
        }
      };
      if (!is_reverse) load_values();
      Mbarrier& inverse_full = shared.inverse.expect(use, sizeof(shared.n) + sizeof(shared.n_lo));
      cuda::tma_load(&shared.n, &matrices.n, sizeof(shared.n), inverse_full);
      cuda::tma_load(&shared.n_lo, &wide.n_lo, sizeof(shared.n_lo), inverse_full);
      if (!is_reverse) continue;
      load_values();
      load_wide_rows(shared.q, p.q_descriptor, key_head, step, batch, shared.queries.expect(use, sizeof(shared.q)));
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

 private:
  template <bool backward>
  __device__ __forceinline__ void scan(TileState& state, const StateTile& state_tile, int index,
                                       const FragmentLane& kept_lane) {
#pragma unroll 1
    for (int use = 0; use < at.chunks; ++use) {
      const int chunk = chunk_at(use), stage = use % Shared::kStages, steps = at.steps_of(chunk);
      const bool is_cut = is_packed(p) && steps < kChunk;
      const BwdTables& tables = shared.tables[stage];
      // Addresses are recomputed: kept through the loop, they would spill.
      const FragmentLane lane = kept_lane.opaque();
      const FragmentPairs<> pairs(lane);
      shared.keys.wait(use);
      if (is_cut) {
        clear_steps(shared.k[stage].panels, steps);
        cuda::barrier_sync(kClearBarrier, kConsumerThreadsOfBlock);
      }
      const uint64_t k_rows = make_operand(shared.k[stage]), n_rows = make_operand(shared.n),
                     n_lo_rows = make_operand(shared.n_lo);

      float u[kStepBlocks][4];
      multiply_state<Scalar, 3>(state, [&](int k, const uint32_t (&s)[4]) {
        cuda::gemm<Scalar, false>(u, s, columns_of(k_rows, k), k > 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs.at(shared.states[index], 2 * k + i / 2, i % 2) = s[i];
      });
      send_state<backward>(chunk, state_tile, index);
      cuda::warpgroup_wait<0>(u);
      // While no product is in flight: the compiler waits for those before a loop.
      shared.values.wait(use);
      shared.inverse.wait(use);
      if (is_cut) {
        clear_steps(shared.rows[index].panels, steps);
        sync_warpgroup(index);
      }
      if constexpr (backward) {
        shared.pairs.wait(use);
#pragma unroll
        for (int n = 0; n < kStepBlocks; ++n) {
          const float2 decay = column_pair(tables.gain_to_chunk_end, n, lane);
#pragma unroll
          for (int i = 0; i < 4; ++i) u[n][i] *= i % 2 == 0 ? decay.x : decay.y;
        }
        make_opaque(u);
        const uint64_t g_rows = make_operand(shared.rows[index]), p_rows = make_operand(shared.p);
        cuda::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kStepGroups; ++i) cuda::gemm<Scalar, true, true>(u, rows_of(g_rows, i), rows_of(p_rows, i), true);
        cuda::warpgroup_commit();
        cuda::warpgroup_wait<0>(u);
        shared.pairs.release(use);
      }

      // u becomes R^T or dU^T; the next product's operand is that times beta, in a hi/lo split.
      uint32_t scaled[kStepGroups][4], scaled_lo[kStepGroups][4];
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        uint32_t values[4];
        if constexpr (!backward) {
          cuda::ldmatrix_transposed(values, shared.rows[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 2 * j + i / 2, half = i % 2;
          float &low = u[n][2 * half], &high = u[n][2 * half + 1];
          if constexpr (!backward) {
            const float2 decay = column_pair(tables.exp_cumsum, n, lane), v = cuda::unpack<Scalar>(values[i]);
            low = fmaf(-decay.x, low, v.x);
            high = fmaf(-decay.y, high, v.y);
          }
          const float2 beta = column_pair(tables.beta, n, lane);
          scaled[j][i] = cuda::pack<Scalar>(beta.x * low, beta.y * high);
          scaled_lo[j][i] = cuda::pack_lo<Scalar>(beta.x * low, beta.y * high, scaled[j][i]);
        }
      }
      if constexpr (!backward) shared.values.release(use);
      make_opaque(u);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        const auto multiply = [&](const uint32_t (&a)[4], uint64_t rows) {
          cuda::gemm<Scalar, !backward>(u, a, backward ? columns_of(rows, j) : rows_of(rows, j), true);
        };
        multiply(scaled[j], n_rows);
        multiply(scaled[j], n_lo_rows);
        multiply(scaled_lo[j], n_rows);
      }
      cuda::warpgroup_commit();
      state.decay(tables.chunk_decay);
      make_opaque(state.values);
      const bool keeps_state = !has_reset(p, tables);
      cuda::warpgroup_wait<0>(u);
      shared.inverse.release(use);

      auto& to_send = shared.steps[index];
      if constexpr (backward) {
        const ValueGradients<Scalar> value_gradients{p, state_tile, index, lane};
        // Maps of segments have no workspace, and write no gradients.
        const bool has_workspace = p.states != nullptr;
        if (has_workspace && is_cut) value_gradients.write_cut(to_send, u, tables, at, chunk);
        if (has_workspace && tables.has_small_beta) {
          value_gradients.write_undivided(target_of(chunk, state_tile)->y, to_send, u, pairs);
          cuda::tma_store_wait_read<0>();
          sync_warpgroup(index);
        }
        value_gradients.put(to_send, u, tables);
      } else {
#pragma unroll
        for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            pairs.at(to_send, n, half) = cuda::pack<Scalar>(u[n][2 * half], u[n][2 * half + 1]);
          }
        }
        if constexpr (kHasLowBits<Scalar>) {
          if (p.states != nullptr && state_tile.is_there()) {
            target_of(chunk, state_tile)->low_bits[threadIdx.x % kWarpgroupThreads] = pack_low_bits(u);
          }
        }
      }
      // The chunk adds E or Y, scaled by the steps' factors, to the state. Forward in time the operand is a hi/lo split.
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        float2 factor = column_pair(backward ? tables.exp_cumsum : tables.gain_to_chunk_end, n, lane);
        const float2 beta = column_pair(tables.beta, n, lane);
        factor.x *= backward ? -beta.x : beta.x;
        factor.y *= backward ? -beta.y : beta.y;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = factor.x * u[n][2 * half], high = factor.y * u[n][2 * half + 1];
          uint32_t& rounded = scaled[n / 2][n % 2 * 2 + half];
          rounded = cuda::pack<Scalar>(low, high);
          if constexpr (!backward) scaled_lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(low, high, rounded);
        }
      }
      if constexpr (backward) {
        shared.queries.wait(use);
        if (is_cut) {
          clear_steps(shared.q.panels, steps);
          cuda::barrier_sync(kClearBarrier, kConsumerThreadsOfBlock);
        }
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
          cuda::ldmatrix_transposed(scaled_lo[j], shared.rows[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 decay = column_pair(tables.query_decay, 2 * j + i / 2, lane),
                         g = cuda::unpack<Scalar>(scaled_lo[j][i]);
            scaled_lo[j][i] = cuda::pack<Scalar>(decay.x * g.x, decay.y * g.y);
          }
        }
        shared.values.release(use);
      }
      const uint64_t q_rows = make_operand(shared.q);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        add_to_state<Scalar>(state, scaled[j], rows_of(k_rows, j), j > 0 || keeps_state);
        add_to_state<Scalar>(state, scaled_lo[j], rows_of(backward ? q_rows : k_rows, j), true);
      }
      cuda::warpgroup_commit();
      send_steps<backward>(chunk, state_tile, index, lane, is_cut);
      cuda::warpgroup_wait<0>(state.values);
      if constexpr (backward) shared.queries.release(use);
      shared.keys.release(use);
    }
    cuda::tma_store_wait_read<0>();
  }

  __device__ __forceinline__ StatesOfChunk* target_of(int chunk, const StateTile& state_tile) const {
    return states_of_chunk<kStateColumns>(p, chunk_number(chunk), at.group, state_tile.first_row / kStateRows);
  }
  // They start the copies of the tiles that the warpgroup has written. TMA has then read the tile sent before, which is the
  // next to be overwritten.
  template <bool backward>
  __device__ __forceinline__ void send_state(int chunk, const StateTile& state_tile, int index) {
    const bool starts = publish(state_tile, index);
    StatesOfChunk* const target = target_of(chunk, state_tile);
    BwdStatePart* const second = second_part_of(p, target);
    const auto& panels = shared.states[index].panels;
    cuda::tma_store(backward ? &target->d : &target->s, &panels[0], sizeof(target->s), starts);
    cuda::tma_store(backward ? &second->d : &second->s, &panels[SmemTile<kStateColumns>::kPanels], sizeof(second->s), starts);
  }
  template <bool backward>
  __device__ __forceinline__ void send_steps(int chunk, const StateTile& state_tile, int index, const FragmentLane& lane,
                                             bool is_cut) {
    const bool starts = publish(state_tile, index);
    if constexpr (backward) {
      ValueGradients<Scalar>{p, state_tile, index, lane}.send(shared.steps[index], at, chunk, starts && !is_cut);
    } else {
      cuda::tma_store(&target_of(chunk, state_tile)->e, &shared.steps[index], sizeof(shared.steps[index]), starts);
    }
  }
  __device__ __forceinline__ bool publish(const StateTile& state_tile, int index) {
    cuda::tma_store_wait_read<0>();
    cuda::fence_proxy_async();
    sync_warpgroup(index);
    return threadIdx.x % kWarpgroupThreads == 0 && p.states != nullptr && state_tile.is_there();
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdWideStates<Scalar>::kThreads : kWarpSize, 1)
    delta_rule_bwd_wide_states_kernel(const __grid_constant__ DeltaRuleBwdParams p,
                                      const __grid_constant__ WorkPartition partition) {
#if SSM_KERNELS_HAS_WGMMA
  run_states<BwdWideStates<Scalar>>(p, partition);
#endif
}

}  // namespace ssm_kernels::delta_rule
