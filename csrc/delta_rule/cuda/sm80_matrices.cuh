// The first of the delta rule's kernels with mma.sync: N, P and the tables of every chunk and value head (sm80_chunk.cuh), all
// at once. A block of one warpgroup takes a chunk of a head. It multiplies 64 columns of keys and queries at a time, and
// divides each row of the inverse by that row's beta to get N. A beta below kLeastBeta, which is too small to change another
// row, counts as kLeastBeta. Products of the inverse's blocks are 3xTF32 for every dtype: in fp16, for correlated keys, TF32
// would make most of the error.
#pragma once

#include "cuda/triangular_inverse.cuh"
#include "delta_rule/cuda/sm80_chunk.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar>
struct alignas(128) Sm80MatricesShared {
  StepTile<Scalar> k, q;
  cuda::TriangularInverseOf<true> inverse;
  DeltaRuleTablesOf<Scalar> tables;
};

template <typename Scalar>
struct Sm80Matrices {
  using Shared = Sm80MatricesShared<Scalar>;
  using Gates = DecayGates<Scalar>;
  static constexpr int kThreads = kWarpgroupThreads, kColumns = kChunk;  // of a part of the rows
  static constexpr float kLeastBeta = 0x1p-40f;

  const DeltaRuleSm80Params& p;
  Shared& shared;
  const ChunkOfHead& at;

  __device__ __forceinline__ void run() {
    const FragmentLane lane;
    auto& target = *sm80_matrices_of<Scalar>(p, at.number, at.head);
    copy(0);
    if (lane.warp == 1) make_tables();
    float of_queries[kStepBlocks][4] = {}, of_keys[kStepBlocks][4] = {};
#pragma unroll 1
    for (int first = 0; first < p.dstate; first += kColumns) {
      if (first > 0) {
        __syncthreads();  // all warps have read the columns before
        copy(first);
      }
      cuda::cp_async_wait<0>();
      __syncthreads();
      const auto k = operand_of(shared.k, lane), q = operand_of(shared.q, lane);
#pragma unroll kUnrolledGroups < Scalar>
      for (int group = 0; group < kColumns / 16; ++group) {
        cuda::gemm<Scalar, false, false>(of_keys, columns_of(k, group), columns_of(k, group), true);
        cuda::gemm<Scalar, false, false>(of_queries, columns_of(q, group), columns_of(k, group), true);
      }
    }
    const auto& tables = shared.tables;
    const bool may_reset = has_reset(p, tables);
    const FragmentPairs<sizeof(Scalar)> pairs(lane);
    const auto ones = [](int) { return float2{1, 1}; };
    const float query_factors[2] = {tables.query_factor[lane.row], tables.query_factor[lane.row + 8]};
    scale_pairs<true>(may_reset, of_queries, query_factors, ones, tables, lane);
    put_tile<Scalar>(target.p, of_queries, pairs);

    float key_factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      key_factors[half] = key_row_factor(tables, row, not_zero(tables.beta[row]));
    }
    scale_pairs<false>(may_reset, of_keys, key_factors, ones, tables, lane);
    float diagonal_blocks[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float element = of_keys[n][i];
#pragma unroll
        for (int warp = 1; warp < kWarpgroupWarps; ++warp) element = lane.warp == warp ? of_keys[2 * warp + n][i] : element;
        diagonal_blocks[n][i] = element;
      }
    }
    typename cuda::TriangularInverseOf<true>::DiagonalBlock diagonal;
    shared.inverse.put_left(of_keys, lane);
    shared.inverse.put_diagonal(diagonal_blocks[0], diagonal_blocks[1], diagonal, lane);
#pragma unroll
    for (auto& part : target.n) {
      for (int n = 0; n < 2 * lane.warp; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) pairs.at(part, n, half) = {};
      }
    }
    __syncthreads();
    shared.inverse.multiply(diagonal, lane, [&](int of_diagonal, const float (&transposed)[4]) {
      const int n = 2 * lane.warp + of_diagonal;
      const float2 beta = column_pair(tables.beta, n, lane);
      const float inverse[2] = {1 / not_zero(beta.x), 1 / not_zero(beta.y)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int distance = kBlockSteps * n + 2 * lane.pair - (lane.row + 8 * half);
        const float low = distance > 0 ? transposed[2 * half] * inverse[0] : 0.0f,
                    high = distance + 1 > 0 ? transposed[2 * half + 1] * inverse[1] : 0.0f;
        const auto rounded = cuda::pack<Scalar>(low, high);
        pairs.at(target.n[0], n, half) = rounded;
        if constexpr (!kIsFp32<Scalar>) pairs.at(target.n[1], n, half) = cuda::pack_lo<Scalar>(low, high, rounded);
      }
    });
    const auto* const source = reinterpret_cast<const uint4*>(&shared.tables);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(tables) / sizeof(uint4)); i += kThreads) {
      reinterpret_cast<uint4*>(&target.tables)[i] = source[i];
    }
  }

 private:
  static __device__ __forceinline__ float not_zero(float beta) { return fabsf(beta) < kLeastBeta ? kLeastBeta : beta; }

  __device__ __forceinline__ void copy(int first) {
    const int key_head = at.head / p.value_heads_per_key_head;
    copy_rows<Scalar, kColumns>(shared.k, at.template rows<Scalar>(p.k, key_head, at.chunk) + first, p.k.stride_step,
                                p.dstate - first, at.steps(), threadIdx.x, kThreads);
    copy_rows<Scalar, kColumns>(shared.q, at.template rows<Scalar>(p.q, key_head, at.chunk) + first, p.q.stride_step,
                                p.dstate - first, at.steps(), threadIdx.x, kThreads);
    cuda::cp_async_commit();
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

template <typename Scalar>
__global__ void __launch_bounds__(Sm80Matrices<Scalar>::kThreads)
    delta_rule_sm80_matrices_kernel(const __grid_constant__ DeltaRuleSm80Params p) {
  __shared__ Sm80MatricesShared<Scalar> shared;
  const ChunkOfHead at(p, static_cast<int>(blockIdx.x));
  if (at.is_there()) Sm80Matrices<Scalar>{p, shared, at}.run();
}

}  // namespace ssm_kernels::delta_rule
