// The chains over time of the delta rule's backward with a gate per channel of the key: the states S and their gradients D
// before and after each chunk, and with them what each step adds to the state and its gradient. With the names of KdaBwdChunk
// and g the gradient of out, forward in time
//
//   R^T = V^T - S K_in^T          E^T = R^T + (R^T diag(beta)) N^T          S <- S diag(decay) + (E^T diag(beta)) K_out
//
// and backward in time, with D the gradient of the state after the chunk,
//
//   dU^T = g^T P + D K_out^T      Y^T = dU^T + (dU^T diag(beta)) N          D <- D diag(decay) + g^T Q - (Y^T diag(beta)) K_in
//
// Blocks, their warpgroups and hi/lo splits are those of bwd_states.cuh. S, D, E and Y go to memory, once rounded, for
// kda_bwd_chunks.cuh.
#pragma once

#include <cstddef>

#include "cuda/chunked/barriers.cuh"
#include "cuda/chunked/state.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/kda_chunk.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"

namespace ssm_kernels::delta_rule {

struct KdaBwdStatesShared {
  static constexpr int kStages = 2;
  struct alignas(kOperandAlignment) Stage {
    KdaBwdChunk chunk;
    alignas(kOperandAlignment) SmemTile<kStateRows> rows[kWarpgroups];  // of v or g
  };
  Stage stages[kStages];
  SmemTile<kStateColumns> states[kWarpgroups];  // S or D, and E^T or Y^T, on their way to memory
  SmemTile<kChunk> steps[kWarpgroups];
  Mbarrier full[kStages], empty[kStages];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(KdaBwdStatesShared)); }
};

template <typename Scalar>
struct KdaBwdStates {
  using Shared = KdaBwdStatesShared;
  using Stage = Shared::Stage;
  using TileState = State<kStateColumns>;
  static constexpr int kStateGroups = kStateColumns / 16;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads, kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

  const KdaBwdParams& p;
  const WorkPartition& partition;
  Shared& shared;
  const WorkSpan& at;
  const bool is_reverse;

  // Run by all threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x >= Shared::kStages) return;
    shared.full[threadIdx.x].init(1);
    shared.empty[threadIdx.x].init(kConsumerThreads);
  }
  __device__ __forceinline__ int chunk_at(int position) const { return is_reverse ? at.chunks - 1 - position : position; }
  __device__ __forceinline__ int64_t chunk_number(int chunk) const { return first_chunk_index(p, at.entry) + chunk; }

  // Run by one thread.
  __device__ __forceinline__ void produce() {
    const int head = at.group, batch = static_cast<int>(at.batch), first_row = StateTile(p, partition, at, 0).first_row;
    PipelineState pipeline;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      if (pipeline.phase > 0) shared.empty[pipeline.stage].wait(pipeline.phase - 1);
      Stage& target = shared.stages[pipeline.stage];
      Mbarrier& full = shared.full[pipeline.stage];
      const int chunk = chunk_at(position), step = static_cast<int>(at.start) + chunk * kChunk;
      const KdaBwdChunk& source = static_cast<const KdaBwdChunk*>(p.matrices)[chunk_number(chunk) * p.heads + head];
      KdaBwdChunk& to = target.chunk;
      // Q and P backward in time alone.
      const int skipped = is_reverse ? 0 : static_cast<int>(sizeof(to.q) + sizeof(to.p));
      full.arrive_and_expect_tx(static_cast<int>(sizeof(to) + sizeof(target.rows)) - skipped);
      if (is_reverse) {
        cuda::tma_load(&to, &source, sizeof(to), full);
      } else {
        cuda::tma_load(&to.k_in, &source.k_in, sizeof(to.k_in) + sizeof(to.k_out), full);
        cuda::tma_load(&to.n, &source.n, static_cast<int>(sizeof(to) - offsetof(KdaBwdChunk, n)), full);
      }
      for (int i = 0; i < kWarpgroups; ++i) {
        cuda::tma_load_tile(&target.rows[i], is_reverse ? p.grad_out_descriptor : p.v_descriptor, first_row + i * kStateRows,
                            head, step, batch, full);
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

 private:
  template <bool backward>
  __device__ __forceinline__ void scan(TileState& state, const StateTile& state_tile, int index, const FragmentLane& lane) {
    PipelineState pipeline;
    const FragmentPairs<> pairs(lane);
    const bool has_workspace = p.states != nullptr;
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      const int chunk = chunk_at(position);
      shared.full[pipeline.stage].wait(pipeline.phase);
      Stage& stage = shared.stages[pipeline.stage];
      if (is_packed(p) && at.steps_of(chunk) < kChunk) {
        clear_steps(stage.rows[index].panels, at.steps_of(chunk));
        sync_warpgroup(index);
      }
      if (!backward && p.resets != nullptr && stage.chunk.begins_sequence) state.clear();
      const uint64_t q_rows = make_operand(stage.chunk.q), in_rows = make_operand(stage.chunk.k_in),
                     out_rows = make_operand(stage.chunk.k_out), n_rows = make_operand(stage.chunk.n),
                     p_rows = make_operand(stage.chunk.p);
      BwdStatesOfChunk<kStateColumns>& target =
          *states_of_chunk<kStateColumns>(p, chunk_number(chunk), at.group, state_tile.first_row / kStateRows);

      uint32_t s[kStateGroups][4], x[kStepGroups][4];
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::ldmatrix_transposed(x[j], stage.rows[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
      }
      float u[kStepBlocks][4], y[kStepBlocks][4];
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k)
        cuda::gemm<Scalar, false>(u, s[k], columns_of(backward ? out_rows : in_rows, k), k > 0);
      if constexpr (backward) {
#pragma unroll
        for (int i = 0; i < kStepGroups; ++i) cuda::gemm<Scalar, true>(y, x[i], rows_of(p_rows, i), i > 0);
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
        const float2 beta = column_pair(stage.chunk.beta, n, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &low = u[n][2 * half], &high = u[n][2 * half + 1];
          if constexpr (backward) {
            low += y[n][2 * half];
            high += y[n][2 * half + 1];
          } else {
            const float2 v = cuda::unpack<Scalar>(x[n / 2][n % 2 * 2 + half]);
            low = v.x - low;
            high = v.y - high;
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
#pragma unroll
      for (int n = 0; n < TileState::kBlocks; ++n) {
        const float2 decay = *reinterpret_cast<const float2*>(&stage.chunk.decay[8 * n + 2 * lane.pair]);
#pragma unroll
        for (int i = 0; i < 4; ++i) state.values[n][i] *= i % 2 == 0 ? decay.x : decay.y;
      }
      cuda::warpgroup_wait<0>(u);

      // The chunk adds E or Y, times beta, to the state. Forward in time the operand is a hi/lo split.
      uint32_t added[kStepGroups][4], added_lo[kStepGroups][4];
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        float2 beta = column_pair(stage.chunk.beta, n, lane);
        if constexpr (backward) beta = {-beta.x, -beta.y};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = beta.x * u[n][2 * half], high = beta.y * u[n][2 * half + 1];
          uint32_t& rounded = added[n / 2][n % 2 * 2 + half];
          rounded = cuda::pack<Scalar>(low, high);
          if constexpr (!backward) added_lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(low, high, rounded);
        }
      }
      cuda::warpgroup_arrive();
      if constexpr (backward) {
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) cuda::gemm<Scalar, true>(state.values, x[j], rows_of(q_rows, j), true);
      }
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, true>(state.values, added[j], rows_of(backward ? in_rows : out_rows, j), true);
        if constexpr (!backward) cuda::gemm<Scalar, true>(state.values, added_lo[j], rows_of(out_rows, j), true);
      }
      cuda::warpgroup_commit();
      if (has_workspace) {
#pragma unroll
        for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            pairs.at(shared.steps[index], n, half) = cuda::pack<Scalar>(u[n][2 * half], u[n][2 * half + 1]);
          }
        }
        send(backward ? target.y : target.e, shared.steps[index], state_tile, index);
      }
      cuda::warpgroup_wait<0>(state.values);
      // No gradient passes to the sequence before.
      if (backward && p.resets != nullptr && stage.chunk.begins_sequence) state.clear();
      shared.empty[pipeline.stage].arrive();
      pipeline.advance(Shared::kStages);
    }
    cuda::tma_store_wait_read<0>();
  }

  // Starts the copy of a tile that the warpgroup has written. TMA has then read the one sent before, which is the next to be
  // overwritten.
  template <typename Tile>
  static __device__ __forceinline__ void send(Tile& target, const Tile& tile, const StateTile& state_tile, int index) {
    cuda::tma_store_wait_read<0>();
    cuda::fence_proxy_async();
    sync_warpgroup(index);
    cuda::tma_store(&target, &tile, sizeof(tile), threadIdx.x % kWarpgroupThreads == 0 && state_tile.is_there());
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? KdaBwdStates<Scalar>::kThreads : kWarpSize, 1)
    kda_bwd_states_kernel(const __grid_constant__ KdaBwdParams p, const __grid_constant__ WorkPartition partition) {
#if SSM_KERNELS_HAS_WGMMA
  run_states<KdaBwdStates<Scalar>>(p, partition);
#endif
}

}  // namespace ssm_kernels::delta_rule
