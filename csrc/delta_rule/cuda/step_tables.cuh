// The tables of a chunk of a value head. With qk_l2norm the normalized key is r_j k_j and the normalized query s_i q_i, with
// fp32 factors r and s (step_factors.cuh). The kernels multiply the rows of k and q as they are in memory, and apply the
// factors to accumulators, with the decays: the normalized rows are never rounded.
//
// For the products of rows i with keys j the decay is e^(c_i - c_j), with c the sum of log decays less log r. That is r_j / r_i
// times the decay between the steps, so that the factors of the rows are
//
//   beta_i r_i^2    for keys, of A           scale s_i r_i    for queries, of P
#pragma once

#include "delta_rule/cuda/decay_gates.cuh"
#include "delta_rule/cuda/step_pairs.cuh"

namespace ssm_kernels::delta_rule {

// A lane's two steps. Run by one warp.
template <typename Gates>
struct StepTables {
  ChunkCumsum<1, Gates> sums;
  float query_factor[2], query_decay[2];

  template <typename Params>
  __device__ __forceinline__ void make(const Params& p, const FetchedSteps<Gates>& fetched) {
    sums.make(p, Gates(), &fetched);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float query = p.scale * fetched.loaded[i].query_factor;
      query_factor[i] = query;
      query_decay[i] = query * sums.exp_cumsum[0][i];
      if (p.row_factors.data == nullptr) continue;
      const float key = fetched.is_there(i) ? fetched.loaded[i].key_factor : 1.0f;
      query_factor[i] *= key;
      sums.exp_cumsum[0][i] *= key;
      sums.log2_cumsum[0][i] -= __log2f(key);
    }
  }

  template <typename Tables>
  __device__ __forceinline__ void store(Tables& tables) const {
    sums.store(0, tables);
    put(tables.query_factor, query_factor[0], query_factor[1]);
    put(tables.query_decay, query_decay[0], query_decay[1]);
  }
  template <typename Tables>
  __device__ __forceinline__ void store(const FetchedSteps<Gates>& fetched, Tables& tables) const {
    store(tables);
    put(tables.beta, fetched.loaded[0].beta, fetched.loaded[1].beta);
  }

 private:
  static __device__ __forceinline__ void put(float (&table)[kChunk], float first, float second) {
    reinterpret_cast<float2*>(table)[threadIdx.x % kWarpSize] = {first, second};
  }
};

}  // namespace ssm_kernels::delta_rule
