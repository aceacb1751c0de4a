// The delta rule's forward with wgmma for keys of 129 to 256 columns (wide_state.cuh). In the notation of fwd_sm90.cuh, with N
// and P those of bwd_matrices.cuh:
//
//   R^T = V^T - (S K^T) e^(s_i)          E^T = R^T + (R^T diag(beta)) N^T          U = diag(beta) E
//   O^T = scale (S Q^T) e^(s_i) + U^T P^T
//   S'  = e^(s_l) S + (U_j e^(s_l - s_j))^T K
//
// The kernel before this one computes N, as a hi/lo split, and P for all chunks. All row blocks of V of a head read the same. N
// multiplies a hi/lo split of diag(beta) R, and the identity in the inverse I + diag(beta) N rounds nothing.
//
// A block has two consumer warpgroups, each with 64 rows of V and all columns of S, and a producer warpgroup, of which one
// thread loads everything by TMA.
#pragma once

#include "cuda/chunked/epilogue.cuh"
#include "cuda/chunked/state_carry.cuh"
#include "delta_rule/cuda/chunk_matrices_sm90.cuh"
#include "delta_rule/cuda/fwd_sm90.cuh"
#include "delta_rule/cuda/scan_blocks.cuh"
#include "delta_rule/cuda/wide_state.cuh"

namespace ssm_kernels::delta_rule {

struct FwdWideShared {
  static constexpr int kStages = 2;
  SmemTile<kWideColumns> k[kStages], q[kStages];
  SmemTile<kStateRows> v[kWarpgroups], out[kWarpgroups];
  SmemTile<kChunk> n, n_lo, p;
  SmemTile<kChunk> corrections[kWarpgroups], added[kWarpgroups];  // operands A with rows of V, because registers are few
  DeltaRuleTables tables[kStages];
  TmaBuffer<kStages> keys, queries;  // of k and tables; of q
  TmaBuffer<1> values, inverse, pairs;

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(FwdWideShared)); }
};

template <typename Scalar>
struct FwdWide {
  using Params = DeltaRuleFwdParams;
  using Shared = FwdWideShared;
  using TileState = State<kWideColumns>;
  using Epilogue = TmaEpilogue<Scalar, InOrder, RoundOut, Params>;
  static constexpr bool kIsOfMaps = false;
  static constexpr int kThreads = kConsumerThreadsOfBlock + kWarpgroupThreads;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

  const Params& p;
  const Unpacked<Params>& unpacked;  // as in FwdSm90
  const Schedule& schedule;
  Shared& shared;

  // Run by all threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x != 0) return;
    shared.keys.init();
    shared.queries.init();
    shared.values.init();
    shared.inverse.init();
    shared.pairs.init();
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
    int use = 0;
    for_each_span([&](const auto&, const WorkSpan& at) {
      const int key_head = at.group / p.value_heads_per_key_head, first_row = StateTile(p, schedule, at, 0).first_row,
                batch = static_cast<int>(at.batch);
      const int64_t first_number = chunk_number(p, at, 0);
#pragma unroll 1
      for (int chunk = 0; chunk < at.chunks; ++chunk, ++use) {
        const int stage = use % Shared::kStages, step = static_cast<int>(at.start) + chunk * kChunk;
        const auto& matrices = *matrices_of_chunk(p, first_number + chunk, at.group);
        const auto& wide = *wide_matrices_of_chunk(p, first_number + chunk, at.group);
        Mbarrier& keys_full = shared.keys.expect(use, sizeof(shared.k[0]) + sizeof(DeltaRuleTables));
        load_wide_rows(shared.k[stage], p.k_descriptor, key_head, step, batch, keys_full);
        cuda::tma_load(&shared.tables[stage], &matrices.tables, sizeof(DeltaRuleTables), keys_full);
        load_wide_rows(shared.q[stage], p.q_descriptor, key_head, step, batch, shared.queries.expect(use, sizeof(shared.q[0])));
        // In the order in which consumers release them.
        Mbarrier& values_full = shared.values.expect(use, sizeof(shared.v));
#pragma unroll
        for (int i = 0; i < kWarpgroups; ++i) {
          cuda::tma_load_tile(&shared.v[i], p.v_descriptor, first_row + i * kStateRows, at.group, step, batch, values_full);
        }
        Mbarrier& inverse_full = shared.inverse.expect(use, sizeof(shared.n) + sizeof(shared.n_lo));
        cuda::tma_load(&shared.n, &matrices.n, sizeof(shared.n), inverse_full);
        cuda::tma_load(&shared.n_lo, &wide.n_lo, sizeof(shared.n_lo), inverse_full);
        cuda::tma_load(&shared.p, &wide.p, sizeof(shared.p), shared.pairs.expect(use, sizeof(shared.p)));
      }
    });
  }

  // Run by a consumer warpgroup.
  __device__ __forceinline__ void consume(int index) {
    const FragmentLane lane = FragmentLane::opaque_thread();
    int use = 0;
    const StateCarry<kWideColumns, NoMap, Unpacked<Params>> carry(unpacked, schedule, index);
    for_each_span([&](const auto& scheduler, const WorkSpan& at) {
      const StateTile state_tile(p, schedule, at, index);
      TileState state;
      carry.load_before(state, scheduler, lane);
      scan_span(state, at, state_tile, index, lane, use);
      carry.store_after(state, scheduler, lane);
    });
    Epilogue::wait_for_sent();
  }

 private:
  __device__ __forceinline__ void scan_span(TileState& state, const WorkSpan& at, const StateTile& state_tile, int index,
                                            const FragmentLane& kept_lane, int& use) {
    const Epilogue out(p, at, state_tile, kept_lane);
#pragma unroll 1
    for (int left = at.chunks; left > 0; --left, ++use) {
      const int stage = use % Shared::kStages, steps = at.steps_of(at.chunks - left);
      const DeltaRuleTables& tables = shared.tables[stage];
      shared.keys.wait(use);
      shared.queries.wait(use);
      if (p.cu_seqlens != nullptr && steps < kChunk) {
        clear_steps(shared.k[stage].panels, steps);
        cuda::barrier_sync(kClearBarrier, kConsumerThreadsOfBlock);
      }
      const FragmentLane lane = kept_lane.opaque();  // addresses are recomputed: kept through the loop, they would spill
      const uint64_t k_rows = make_operand(shared.k[stage]), q_rows = make_operand(shared.q[stage]);

      float u[kStepBlocks][4], y[kStepBlocks][4];
      multiply_state<Scalar, 1>(state, [&](int k, const uint32_t (&s)[4]) {
        cuda::gemm<Scalar, false>(u, s, columns_of(k_rows, k), k > 0);
        cuda::gemm<Scalar, false>(y, s, columns_of(q_rows, k), k > 0);
      });
      // All warps have written the previous chunk's out.
      sync_warpgroup(index);
      if (left < at.chunks) out.send(shared.out[index], at.chunks - left - 1);
      cuda::warpgroup_wait<0>(u);
      cuda::warpgroup_wait<0>(y);
      shared.queries.release(use);
      // While no product is in flight: the compiler waits for those before a loop.
      shared.values.wait(use);
      shared.inverse.wait(use);
      if (p.cu_seqlens != nullptr && steps < kChunk) {
        clear_steps(shared.v[index].panels, steps);
        sync_warpgroup(index);
      }

      // u becomes R^T; the next product's operand is that times beta, in a hi/lo split.
      const FragmentPairs<> pairs(lane);
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        uint32_t values[4];
        cuda::ldmatrix_transposed(values, shared.v[index].ldmatrix_row(16 * j, 2 * lane.warp, lane.index));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 2 * j + i / 2, half = i % 2;
          const float2 decay = column_pair(tables.exp_cumsum, n, lane), beta = column_pair(tables.beta, n, lane),
                       v = cuda::unpack<Scalar>(values[i]);
          float &low = u[n][2 * half], &high = u[n][2 * half + 1];
          low = fmaf(-decay.x, low, v.x);
          high = fmaf(-decay.y, high, v.y);
          const uint32_t rounded = cuda::pack<Scalar>(beta.x * low, beta.y * high);
          pairs.at(shared.corrections[index], n, half) = rounded;
          pairs.at(shared.added[index], n, half) = cuda::pack_lo<Scalar>(beta.x * low, beta.y * high, rounded);
        }
      }
      shared.values.release(use);
      cuda::fence_proxy_async();
      sync_warpgroup(index);
      const uint64_t corrections = make_operand(shared.corrections[index]), added = make_operand(shared.added[index]);
      const uint64_t n_rows = make_operand(shared.n), n_lo_rows = make_operand(shared.n_lo);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, false, true>(u, columns_of(corrections, j), rows_of(n_rows, j), true);
        cuda::gemm<Scalar, false, true>(u, columns_of(corrections, j), rows_of(n_lo_rows, j), true);
        cuda::gemm<Scalar, false, true>(u, columns_of(added, j), rows_of(n_rows, j), true);
      }
      cuda::warpgroup_commit();
      state.decay(tables.chunk_decay);
      const bool keeps_state = !has_reset(p, tables);
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        const float2 decay = column_pair(tables.query_decay, n, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[n][i] *= i % 2 == 0 ? decay.x : decay.y;
      }
      make_opaque(state.values);
      make_opaque(y);
      cuda::warpgroup_wait<0>(u);
      shared.inverse.release(use);
      shared.pairs.wait(use);
      sync_warpgroup(index);  // the products of all warps have read the corrections

      // U^T, and U^T times the decays to the end of the chunk.
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
        const float2 beta = column_pair(tables.beta, n, lane), to_end = column_pair(tables.gain_to_chunk_end, n, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = beta.x * u[n][2 * half], high = beta.y * u[n][2 * half + 1];
          pairs.at(shared.corrections[index], n, half) = cuda::pack<Scalar>(low, high);
          pairs.at(shared.added[index], n, half) = cuda::pack<Scalar>(to_end.x * low, to_end.y * high);
        }
      }
      cuda::fence_proxy_async();
      sync_warpgroup(index);
      const uint64_t p_rows = make_operand(shared.p);
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        cuda::gemm<Scalar, false, false>(y, columns_of(corrections, j), columns_of(p_rows, j), true);
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStepGroups; ++j) {
        add_to_state<Scalar>(state, columns_of(added, j), rows_of(k_rows, j), j > 0 || keeps_state);
      }
      cuda::warpgroup_commit();
      out.wait_for_sent();
      sync_warpgroup(index);
      cuda::warpgroup_wait<1>(y);
      shared.pairs.release(use);
      out.write(y, {}, nullptr, shared.out[index], lane);
      cuda::warpgroup_wait<0>(state.values);
      shared.keys.release(use);
    }
    sync_warpgroup(index);
    out.send_last(shared.out[index]);
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? FwdWide<Scalar>::kThreads : kWarpSize, 1)
    delta_rule_fwd_wide_kernel(const __grid_constant__ Unpacked<DeltaRuleFwdParams> p,
                               const __grid_constant__ Schedule schedule) {
#if SSM_KERNELS_HAS_WGMMA
  run_scan<FwdWide<Scalar>>(p, schedule);
#endif
}

}  // namespace ssm_kernels::delta_rule
