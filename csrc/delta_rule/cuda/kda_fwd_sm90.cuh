// The scan over chunks of the delta rule with a gate per channel of the key, for fp16 and bf16 on compute capability 9.0a. A
// kernel before it scales the rows of queries and keys and computes M and P (kda_chunks.cuh); with its names, those of
// KdaChunk, and S (V x K) the state before the chunk,
//
//   R^T = V^T - S K_in^T        U^T = R^T M^T        O^T = S Q^T + U^T P^T        S' = S diag(decay) + U^T K_out
//
// A block has two consumer warpgroups and a producer warpgroup, of which one thread starts TMA loads. A consumer warpgroup
// holds 64 rows of V and up to 128 columns of S as accumulators; as in fwd_sm90.cuh no value of the chain S, R, U, S leaves its
// registers, and blocks share the work as there. R, and U where it is added to the state, are hi/lo splits: the scaled rows are
// roundings that a gate per head does not have.
#pragma once

#include <cstddef>

#include "delta_rule/cuda/fwd_sm90.cuh"
#include "delta_rule/cuda/kda_chunk.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"

namespace ssm_kernels::cuda::chunked {

template <>
inline constexpr bool kAreStrided<Unpacked<delta_rule::KdaFwdParams>> = true;

}  // namespace ssm_kernels::cuda::chunked

namespace ssm_kernels::delta_rule {

struct KdaFwdShared {
  static constexpr int kStages = 2;
  struct alignas(kOperandAlignment) Stage {
    ChunkMatrix inverse;
    SmemTile<kStateRows> v[kWarpgroups];
    KdaChunk chunk;
  };
  Stage stages[kStages];
  SmemTile<kStateRows> out[kWarpgroups];
  Mbarrier full[kStages], empty[kStages];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(KdaFwdShared)); }
};

// states_only: without out, and what it needs.
template <typename Scalar, bool states_only>
struct KdaFwd {
  using Params = KdaFwdParams;
  using Shared = KdaFwdShared;
  using TileState = State<kStateColumns>;
  using Epilogue = TmaEpilogue<Scalar, InOrder, RoundOut, Params>;
  static constexpr bool kIsOfMaps = states_only;
  static constexpr int kStateGroups = kStateColumns / 16;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads, kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

  const Params& p;
  const Unpacked<Params>& unpacked;  // the scheduler of chunks; packed sequences are work tiles of one range each
  const Schedule& schedule;
  Shared& shared;

  // Run by all threads.
  __device__ __forceinline__ void init() {
    for (auto& stage : shared.stages) stage.inverse.clear_left_of_diagonal(static_cast<int>(threadIdx.x), kThreads);
    cuda::fence_proxy_async();
    if (threadIdx.x >= Shared::kStages) return;
    shared.full[threadIdx.x].init(1);
    shared.empty[threadIdx.x].init(kConsumerThreads);
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

  // Run by one thread.
  __device__ __forceinline__ void produce() {
    PipelineState pipeline;
    cuda::grid_dependency_sync();  // with the kernel that computes the chunks' operands
    for_each_span([&](const auto&, const WorkSpan& at) { load(at, pipeline); });
  }

  // Steps of v past the end of the tensor are zeros; those past the end of a packed sequence belong to the next one.
  __device__ __forceinline__ void load(const WorkSpan& at, PipelineState& pipeline) {
    const int first_row = StateTile(p, schedule, at, 0).first_row, batch = static_cast<int>(at.batch);
    const int64_t first_number = chunk_number(p, at, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < at.chunks; ++chunk) {
      if (pipeline.phase > 0) shared.empty[pipeline.stage].wait(pipeline.phase - 1);
      auto& target = shared.stages[pipeline.stage];
      Mbarrier& full = shared.full[pipeline.stage];
      const int64_t place = (first_number + chunk) * p.heads + at.group;
      const KdaChunk& source = static_cast<const KdaChunk*>(p.chunks)[place];
      constexpr int kSkipped = states_only ? static_cast<int>(sizeof(source.q) + sizeof(source.p)) : 0;
      full.arrive_and_expect_tx(kChunkMatrixBytes + sizeof(target.v) + sizeof(target.chunk) - kSkipped);
      if constexpr (states_only) {
        cuda::tma_load(&target.chunk.k_in, &source.k_in, sizeof(source.k_in) + sizeof(source.k_out), full);
        cuda::tma_load(&target.chunk.decay, &source.decay, static_cast<int>(sizeof(source) - offsetof(KdaChunk, decay)), full);
      } else {
        cuda::tma_load(&target.chunk, &source, sizeof(source), full);
      }
#pragma unroll
      for (int i = 0; i < kWarpgroups; ++i) {
        cuda::tma_load_tile(&target.v[i], p.v_descriptor, first_row + i * kStateRows, at.group,
                            static_cast<int>(at.start) + chunk * kChunk, batch, full);
      }
      target.inverse.load(p.inverses, place, full);
      pipeline.advance(Shared::kStages);
    }
  }

  // Run by a consumer warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const FragmentLane lane = FragmentLane::opaque_thread();
    PipelineState pipeline;
    const StateCarry<kStateColumns, ScalarMap, Unpacked<Params>> carry(unpacked, schedule, index);
    for_each_span([&](const auto& scheduler, const WorkSpan& at) {
      const StateTile state_tile(p, schedule, at, index);
      TileState state;
      carry.load_before(state, scheduler, lane);
      scan_span(state, at, state_tile, index, lane, pipeline);
      carry.store_after(state, scheduler, lane);
    });
    Epilogue::wait_for_sent();
  }

 private:
  __device__ __forceinline__ void scan_span(TileState& state, const WorkSpan& at, const StateTile& state_tile, int index,
                                            const FragmentLane& lane, PipelineState& pipeline) {
    const Epilogue out(p, at, state_tile, lane);
#pragma unroll 1
    for (int left = at.chunks; left > 0; --left) {
      shared.full[pipeline.stage].wait(pipeline.phase);
      auto& tiles = shared.stages[pipeline.stage];
      const int steps = at.steps_of(at.chunks - left);
      if (p.resets != nullptr && tiles.chunk.begins_sequence) state.clear();
      if (p.cu_seqlens != nullptr && steps < kChunk) {
        clear_steps(tiles.v[index].panels, steps);
        sync_warpgroup(index);
      }
      const uint64_t q_rows = make_operand(tiles.chunk.q), in_rows = make_operand(tiles.chunk.k_in),
                     out_rows = make_operand(tiles.chunk.k_out), p_rows = make_operand(tiles.chunk.p);

      uint32_t s[kStateGroups][4], x[kStepGroups][4], x_lo[kStepGroups][4];
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) state.template pack<Scalar>(k, s[k]);
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::ldmatrix_transposed(x[j], tiles.v[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
      }
      float u[kStepBlocks][4], y[kStepBlocks][4];
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kStateGroups; ++k) cuda::gemm<Scalar, false>(u, s[k], columns_of(in_rows, k), k > 0);
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(u);
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t& pair = x[n / 2][n % 2 * 2 + half];
          const float2 v = cuda::unpack<Scalar>(pair);
          const float low = v.x - u[n][2 * half], high = v.y - u[n][2 * half + 1];
          pair = cuda::pack<Scalar>(low, high);
          x_lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(low, high, pair);
        }
      }
      cuda::warpgroup_arrive();
      tiles.inverse.template multiply<Scalar>(u, x);
      tiles.inverse.template multiply_high<Scalar>(u, x_lo);
      cuda::warpgroup_commit();
      cuda::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < (states_only ? 0 : kStateGroups); ++k) {
        cuda::gemm<Scalar, false>(y, s[k], columns_of(q_rows, k), k > 0);
      }
      cuda::warpgroup_commit();
      decay(state, tiles.chunk.decay, lane);
      if constexpr (!states_only) {
        // All warps have written the previous chunk's out.
        sync_warpgroup(index);
        if (left < at.chunks) out.send(shared.out[index], at.chunks - left - 1);
      }
      cuda::warpgroup_wait<1>(u);

#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t& pair = x[n / 2][n % 2 * 2 + half];
          pair = cuda::pack<Scalar>(u[n][2 * half], u[n][2 * half + 1]);
          x_lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(u[n][2 * half], u[n][2 * half + 1], pair);
        }
      }
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, true>(state.values, x[j], rows_of(out_rows, j), true);
        cuda::gemm<Scalar, true>(state.values, x_lo[j], rows_of(out_rows, j), true);
      }
      cuda::warpgroup_commit();
      if constexpr (!states_only) {
        cuda::warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) cuda::gemm<Scalar, false>(y, x[j], columns_of(p_rows, j), true);
        cuda::warpgroup_commit();
        out.wait_for_sent();
        sync_warpgroup(index);
      }
      cuda::warpgroup_wait<0>(state.values);
      if constexpr (!states_only) cuda::warpgroup_wait<0>(y);
      shared.empty[pipeline.stage].arrive();
      if constexpr (!states_only) out.write(y, x, nullptr, shared.out[index], lane);
      pipeline.advance(Shared::kStages);
    }
    if constexpr (!states_only) {
      sync_warpgroup(index);
      out.send_last(shared.out[index]);
    }
  }

  static __device__ __forceinline__ void decay(TileState& state, const float (&decays)[kStateColumns],
                                               const FragmentLane& lane) {
#pragma unroll
    for (int n = 0; n < TileState::kBlocks; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(&decays[8 * n + 2 * lane.pair]);
#pragma unroll
      for (int i = 0; i < 4; ++i) state.values[n][i] *= i % 2 == 0 ? pair.x : pair.y;
    }
  }
};

template <typename Scalar, bool states_only>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? KdaFwd<Scalar, states_only>::kThreads : kWarpSize, 1)
    kda_fwd_sm90_kernel(const __grid_constant__ Unpacked<KdaFwdParams> p, const __grid_constant__ Schedule schedule) {
#if SSM_KERNELS_HAS_WGMMA
  run_scan<KdaFwd<Scalar, states_only>>(p, schedule);
#endif
}

}  // namespace ssm_kernels::delta_rule
