// The first kernel of the delta rule's backward with wgmma: the matrices and the tables of every chunk and value head, all at
// once. A block of one warpgroup takes a chunk of a head. Keys and queries come by TMA, while a warp computes the tables of
// decays. Then
//
//   A = strictly lower part of diag(beta) (K K^T G)       (I + A)^-1 = I + diag(beta) N       P = scale (Q K^T G)
//
// with G(i, j) = e^(s_i - s_j) for j <= i. The block writes N, P and the tables to memory (bwd_workspace.cuh). To get N it
// divides each row of the inverse by that row's beta. A beta below kLeastBeta, which is too small to change another row, counts
// as kLeastBeta. For keys of more than kStateColumns columns N is a hi/lo split. P is left out where the next kernel makes it
// (bwd_states.cuh).
#pragma once

#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/triangular_inverse.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/step_tables.cuh"
#include "delta_rule/cuda/step_tiles.cuh"

namespace ssm_kernels::delta_rule {

template <int columns, bool has_pairs>
struct BwdMatricesShared {
  struct Keys {
    SmemTile<columns> k;
  };
  struct KeysAndQueries : Keys {
    SmemTile<columns> q;
  };
  using Rows = std::conditional_t<has_pairs, KeysAndQueries, Keys>;
  static constexpr bool kHasLo = is_wide(columns);
  // N, and the blocks of the inverse, take the place of the rows.
  union alignas(kOperandAlignment) {
    Rows rows;
    struct {
      SmemTile<kChunk> n;
      std::conditional_t<kHasLo, SmemTile<kChunk>, cuda::Empty> n_lo;
      cuda::TriangularInverse inverse;
    };
  };
  std::conditional_t<kHasLo || !has_pairs, cuda::Empty, SmemTile<kChunk>> own_p;
  DeltaRuleTables tables;
  Mbarrier full;

  // Three blocks of wide rows fit into a multiprocessor if P takes the place of the last columns of q.
  __device__ __forceinline__ SmemTile<kChunk>& p() {
    if constexpr (kHasLo) {
      constexpr int kPanels = columns / kChunk;
      static_assert(sizeof(n) + sizeof(n_lo) + sizeof(inverse) <= sizeof(rows.k), "N and the blocks leave q");
      return reinterpret_cast<SmemTile<kChunk>&>(rows.q.panels[kPanels - 1]);
    } else {
      return own_p;
    }
  }

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(BwdMatricesShared)); }
};

template <typename Scalar, int columns, bool has_pairs>
struct BwdMatrices {
  using Shared = BwdMatricesShared<columns, has_pairs>;
  static_assert(has_pairs || !Shared::kHasLo, "the kernels of wide keys read P");
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
      if constexpr (has_pairs) clear_steps(shared.rows.q.panels, rows_of_updates(p, at.steps()));
      clear_steps(shared.rows.k.panels, at.steps());
      __syncthreads();
    }
    const FragmentPairs<> pairs(lane);
    float products[kStepBlocks][4], key_factors[2];
    if constexpr (has_pairs) put_pairs(products, pairs, lane);
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
          if constexpr (Shared::kHasLo) pairs.at(shared.n_lo, n, half) = 0;
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
          if constexpr (Shared::kHasLo) pairs.at(shared.n_lo, n, half) = cuda::pack_lo<Scalar>(low, high, rounded);
        }
      });
    });
    cuda::fence_proxy_async();
    __syncthreads();
    cuda::tma_store(&target.n, &shared.n, sizeof(shared.n), threadIdx.x == 0);
    if constexpr (Shared::kHasLo) {
      cuda::tma_store(low_part_of_chunk(p, at.number, at.head), &shared.n_lo, sizeof(shared.n_lo), threadIdx.x == 0);
    }
    if constexpr (has_pairs) cuda::tma_store(&target.p, &shared.p(), query_matrix_bytes(p.log2_updates > 0), threadIdx.x == 0);
    cuda::tma_store(&target.tables, &shared.tables, sizeof(shared.tables), threadIdx.x == 0);
    cuda::tma_store_wait_read<0>();
  }

 private:
  static __device__ __forceinline__ float not_zero(float beta) { return fabsf(beta) < kLeastBeta ? kLeastBeta : beta; }

  // Run by one thread.
  __device__ __forceinline__ void load() {
    const int key_head = at.head / p.value_heads_per_key_head, batch = static_cast<int>(at.batch);
    int bytes = sizeof(shared.rows.k);
    if constexpr (has_pairs) bytes += static_cast<int>(sizeof(shared.rows.q)) >> p.log2_updates;
    shared.full.arrive_and_expect_tx(bytes);
#pragma unroll
    for (int panel = 0; panel < columns / kTileColumns; ++panel) {
      const int column = panel * kTileColumns;
      if constexpr (has_pairs) {
        cuda::tma_load_tile(&shared.rows.q.panels[panel], p.q_descriptor, column, key_head, at.first() >> p.log2_updates, batch,
                            shared.full);
      }
      cuda::tma_load_tile(&shared.rows.k.panels[panel], p.k_descriptor, column, key_head, at.first(), batch, shared.full);
    }
  }

  // P, from products that it overwrites.
  __device__ __forceinline__ void put_pairs(float (&products)[kStepBlocks][4], const FragmentPairs<>& pairs,
                                            const FragmentLane& lane) {
    if constexpr (!Shared::kHasLo) {
      if (p.log2_updates > 0) {
        make_query_matrix<Scalar>(p, shared.rows.q, shared.rows.k, shared.tables, shared.p(), lane);
        return;
      }
    }
    multiply_by_keys<Scalar>(shared.rows.q, shared.rows.k, products);
    if constexpr (Shared::kHasLo) __syncthreads();  // all warps have read q
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
  }
};

template <typename Scalar, int columns, bool has_pairs>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? BwdMatrices<Scalar, columns, has_pairs>::kThreads : kWarpSize,
                                  BwdMatrices<Scalar, columns, has_pairs>::kBlocksOfMultiprocessor)
    delta_rule_bwd_matrices_kernel(const __grid_constant__ DeltaRuleBwdParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<BwdMatricesShared<columns, has_pairs>>(unaligned_memory);
  const ChunkOfHead at(p, static_cast<int>(blockIdx.x));
  if (!at.is_there()) return;
  if (threadIdx.x == 0) shared.full.init(1);
  __syncthreads();
  BwdMatrices<Scalar, columns, has_pairs>{p, shared, at}.run();
#endif
}

}  // namespace ssm_kernels::delta_rule
