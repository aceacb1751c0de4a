// The first kernel of the delta rule's backward with wgmma: the matrices and the tables of every chunk and value head, all at
// once. A block of one warpgroup takes a chunk of a head. Keys come by TMA, while a warp computes the tables of decays. Then
//
//   A = strictly lower part of diag(beta) (K K^T G)       (I + A)^-1 = I + diag(beta) N
//
// with G(i, j) = e^(s_i - s_j) for j <= i. The block writes N and the tables to memory (bwd_workspace.cuh). To get N it
// divides each row of the inverse by that row's beta. A beta below kLeastBeta, which is too small to change another row, counts
// as kLeastBeta. For keys of more than kStateColumns columns N is a hi/lo split, and the block writes P = scale (Q K^T G) too.
#pragma once

#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/triangular_inverse.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/step_tables.cuh"

namespace ssm_kernels::delta_rule {

template <int columns>
struct BwdMatricesShared {
  static constexpr bool kIsWide = is_wide(columns);
  struct Keys {
    SmemTile<columns> k;
  };
  struct KeysAndQueries : Keys {
    SmemTile<columns> q;
  };
  using Rows = std::conditional_t<kIsWide, KeysAndQueries, Keys>;
  // N, and the blocks of the inverse, take the place of the rows.
  union alignas(kOperandAlignment) {
    Rows rows;
    struct {
      SmemTile<kChunk> n;
      std::conditional_t<kIsWide, SmemTile<kChunk>, cuda::Empty> n_lo;
      cuda::TriangularInverse inverse;
    };
  };
  BwdTables tables;
  Mbarrier full;

  // Three blocks of wide rows fit into a multiprocessor if P takes the place of the last columns of q.
  __device__ __forceinline__ SmemTile<kChunk>& p() {
    constexpr int kPanels = columns / kChunk;
    static_assert(sizeof(n) + sizeof(n_lo) + sizeof(inverse) <= sizeof(rows.k), "N and the blocks leave q");
    return reinterpret_cast<SmemTile<kChunk>&>(rows.q.panels[kPanels - 1]);
  }

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdMatricesShared)); }
};

template <typename Scalar, int columns>
struct BwdMatrices {
  using Shared = BwdMatricesShared<columns>;
  using Gates = DecayGates<Scalar>;
  static constexpr int kThreads = kWarpgroupThreads, kBlocksOfMultiprocessor = is_wide(columns) ? 3 : 5, kTileColumns = 64;
  static constexpr int kMatrixBarrier = 1;  // __syncthreads() is 0
  static constexpr float kLeastBeta = 0x1p-40f;

  const DeltaRuleBwdParams& p;
  Shared& shared;
  const ChunkOfHead& at;

  __device__ __forceinline__ void run() {
    BwdMatricesOfChunk& target = *matrices_of_chunk(p, at.number, at.head);
    const FragmentLane lane;
    if (threadIdx.x == 0) load();
    if (lane.warp == 1) make_tables();
    __syncthreads();
    shared.full.wait(0);
    if (is_packed(p) && at.steps() < kChunk) {
      if constexpr (Shared::kIsWide) clear_steps(shared.rows.q.panels, at.steps());
      clear_steps(shared.rows.k.panels, at.steps());
      __syncthreads();
    }
    const FragmentPairs<> pairs(lane);
    float products[kStepBlocks][4], key_factors[2];
    if constexpr (Shared::kIsWide) put_queries(products, pairs, lane);
    multiply_by_keys<Scalar>(shared.rows.k, shared.rows.k, products);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      key_factors[half] = key_row_factor(shared.tables, row, not_zero(shared.tables.beta[row]));
    }
    // All warps have read the rows.
    __syncthreads();
    visit_warp(lane, [&](auto warp) {
#pragma unroll
      for (int n = 0; n < 2 * warp; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          pairs.at(shared.n, n, half) = 0;
          if constexpr (Shared::kIsWide) pairs.at(shared.n_lo, n, half) = 0;
        }
      }
      cuda::TriangularInverse::DiagonalBlock diagonal;
      apply_decays<warp, /*has_diagonal=*/false>(p, products, key_factors, shared.tables, lane);
      shared.inverse.template put<warp>(products, diagonal, lane);
      // All warps have put their blocks.
      cuda::barrier_sync(kMatrixBarrier, kThreads);
      shared.inverse.template multiply<warp>(diagonal, lane, [&](int n, const float (&transposed)[4]) {
        const float2 beta_of = column_pair(shared.tables.beta, n, lane);
        const float inverse[2] = {__fdividef(1, not_zero(beta_of.x)), __fdividef(1, not_zero(beta_of.y))};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int distance = kBlockSteps * n + 2 * lane.pair - (lane.row + 8 * half);
          const float low = distance > 0 ? transposed[2 * half] * inverse[0] : 0.0f,
                      high = distance + 1 > 0 ? transposed[2 * half + 1] * inverse[1] : 0.0f;
          const uint32_t rounded = cuda::pack<Scalar>(low, high);
          pairs.at(shared.n, n, half) = rounded;
          if constexpr (Shared::kIsWide) pairs.at(shared.n_lo, n, half) = cuda::pack_lo<Scalar>(low, high, rounded);
        }
      });
    });
    cuda::fence_proxy_async();
    __syncthreads();
    cuda::tma_store(&target.n, &shared.n, sizeof(shared.n), threadIdx.x == 0);
    if constexpr (Shared::kIsWide) {
      WideMatricesOfChunk& wide = *wide_matrices_of_chunk(p, at.number, at.head);
      cuda::tma_store(&wide.n_lo, &shared.n_lo, sizeof(wide.n_lo), threadIdx.x == 0);
      cuda::tma_store(&wide.p, &shared.p(), sizeof(wide.p), threadIdx.x == 0);
    }
    cuda::tma_store(&target.tables, &shared.tables, sizeof(shared.tables), threadIdx.x == 0);
    cuda::tma_store_wait_read<0>();
  }

 private:
  static __device__ __forceinline__ float not_zero(float beta) { return fabsf(beta) < kLeastBeta ? kLeastBeta : beta; }

  // Run by one thread.
  __device__ __forceinline__ void load() {
    const int key_head = at.head / p.value_heads_per_key_head, batch = static_cast<int>(at.batch);
    shared.full.arrive_and_expect_tx(sizeof(shared.rows));
#pragma unroll
    for (int panel = 0; panel < columns / kTileColumns; ++panel) {
      const int column = panel * kTileColumns;
      if constexpr (Shared::kIsWide) {
        cuda::tma_load_tile(&shared.rows.q.panels[panel], p.q_descriptor, column, key_head, at.first(), batch, shared.full);
      }
      cuda::tma_load_tile(&shared.rows.k.panels[panel], p.k_descriptor, column, key_head, at.first(), batch, shared.full);
    }
  }

  // P takes the place of some of q.
  __device__ __forceinline__ void put_queries(float (&products)[kStepBlocks][4], const FragmentPairs<>& pairs,
                                              const FragmentLane& lane) {
    multiply_by_keys<Scalar>(shared.rows.q, shared.rows.k, products);
    __syncthreads();  // all warps have read q
    const float query_factors[2] = {shared.tables.query_factor[lane.row], shared.tables.query_factor[lane.row + 8]};
    visit_warp(lane, [&](auto warp) {
      apply_decays<warp, /*has_diagonal=*/true>(p, products, query_factors, shared.tables, lane);
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool is_there = n < 2 * warp + 2;
          pairs.at(shared.p(), n, half) = is_there ? cuda::pack<Scalar>(products[n][2 * half], products[n][2 * half + 1]) : 0;
        }
      }
    });
  }

  // Run by one warp.
  __device__ __forceinline__ void make_tables() {
    FetchedSteps<Gates> fetched;
    fetched.fetch(p, Gates::source(p, at, at.head, at.chunk), at.resets(p, at.chunk), at.steps());
    StepTables<Gates> made;
    made.make(p, fetched);
    made.store(fetched, shared.tables);
    const auto is_small = [&](int i) { return fetched.is_there(i) && is_small_beta<Scalar>(fetched.loaded[i].beta); };
    const bool has_small_beta = __any_sync(kAllLanes, is_small(0) || is_small(1));
    if (threadIdx.x % kWarpSize == 0) shared.tables.has_small_beta = has_small_beta;
  }
};

// The place that a block takes: the first chunks of all sequences come last, because the states' kernel, which begins with
// them, finds them in the cache.
__device__ __forceinline__ int last_chunks_first(const DeltaRuleBwdParams& p, int place) {
  if (is_packed(p)) return place;
  const unsigned heads = static_cast<unsigned>(p.heads), batch = static_cast<unsigned>(p.batch),
                 chunks = static_cast<unsigned>((p.seqlen + kChunk - 1) / kChunk), turn = static_cast<unsigned>(place) / heads;
  return static_cast<int>((turn % batch * chunks + chunks - 1 - turn / batch) * heads + static_cast<unsigned>(place) % heads);
}

template <typename Scalar, int columns>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdMatrices<Scalar, columns>::kThreads : kWarpSize,
                                  BwdMatrices<Scalar, columns>::kBlocksOfMultiprocessor)
    delta_rule_bwd_matrices_kernel(const __grid_constant__ DeltaRuleBwdParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<BwdMatricesShared<columns>>(unaligned_memory);
  cuda::launch_dependents();
  const ChunkOfHead at(p, last_chunks_first(p, static_cast<int>(blockIdx.x)));
  if (!at.is_there()) return;
  if (threadIdx.x == 0) shared.full.init(1);
  __syncthreads();
  BwdMatrices<Scalar, columns>{p, shared, at}.run();
#endif
}

}  // namespace ssm_kernels::delta_rule
