// Stores of the gradients that the last kernel of the delta rule's backward computes (bwd_chunks.cuh), from accumulators of
// which rows are steps.
#pragma once

#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/step_updates.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar, int columns, bool grouped>
struct BwdGradients {
  static constexpr int kColumnBlocks = columns / 8;

  const DeltaRuleBwdParams& p;

  // Y^T has rows of V; steps times beta become rows.
  __device__ __forceinline__ void write_v(const ChunkOfHead& at, const DeltaRuleTables& tables, SmemTile<kChunk>& y, int block,
                                          const FragmentLane& lane) const {
    // No branch: products are in flight.
    const int column = 8 * lane.pair, elements = p.grad_v.data == nullptr ? 0 : p.headdim - block * kStateRows;
    Scalar* const target = at.template rows<Scalar>(p.grad_v, at.head, at.chunk) + block * kStateRows + column;
    const float beta[2] = {tables.beta[lane.row], tables.beta[lane.row + 8]};
#pragma unroll
    for (int groups = 0; groups < kStepGroups; groups += 2) {
      uint32_t rows[2][4];
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        cuda::ldmatrix_transposed(rows[group], y.ldmatrix_row(16 * (groups + group), 2 * lane.warp, lane.index));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 values = cuda::unpack<Scalar>(rows[group][i]);
          rows[group][i] = cuda::pack<Scalar>(beta[i % 2] * values.x, beta[i % 2] * values.y);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half;
        const uint4 vector = exchange({rows[0][half], rows[0][2 + half], rows[1][half], rows[1][2 + half]}, lane);
        if (row < at.steps() && 16 * groups + column < elements) {
          *reinterpret_cast<uint4*>(target + row * p.grad_v.stride_step + 16 * groups) = vector;
        }
      }
    }
  }

  // Writes the rows of a key head. With grouped heads a block computes its value heads in order, and those of the last one are
  // the sums of all: until then this thread adds them up in p.sums, of which blocks need so little that it stays in the L2
  // cache. `index` is that of the warpgroup, 0 for q, which has a row for the last update of
  // each step, and 1 for k. finish() is called before the sums are written.
  template <typename Finish>
  __device__ __forceinline__ void write_rows(const ChunkOfHead& at, const RowsView& view, float (&d)[kColumnBlocks][4],
                                             int index, const FragmentLane& lane, const Finish& finish) const {
    const int key_head = grouped ? at.head / p.value_heads_per_key_head : at.head;
    if (grouped && !add_value_head(d, at.head - key_head * p.value_heads_per_key_head, index)) return;
    finish();
    const int log2_updates = index == 0 ? p.log2_updates : 0;
    const auto has_row = [&](int update) { return update < at.steps() && (index != 0 || is_last_update(p, update)); };
    const auto first_row = [&](auto element) {
      using Element = decltype(element);
      return index == 0 ? step_rows<Element>(p, at, view, key_head, at.chunk)
                        : at.template rows<Element>(view, key_head, at.chunk);
    };
    if (p.has_fp32_rows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half, column = 2 * lane.pair;
        float* const target = first_row(float()) + (row >> log2_updates) * view.stride_step + column;
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          if (has_row(row) && 8 * n + column < p.dstate) {
            *reinterpret_cast<float2*>(target + 8 * n) = {d[n][2 * half], d[n][2 * half + 1]};
          }
        }
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half, column = 8 * lane.pair;
      Scalar* const target = first_row(Scalar()) + (row >> log2_updates) * view.stride_step + column;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = cuda::pack<Scalar>(d[n + i][2 * half], d[n + i][2 * half + 1]);
        const uint4 vector = exchange(words, lane);
        if (has_row(row) && 8 * n + column < p.dstate) *reinterpret_cast<uint4*>(target + 8 * n) = vector;
      }
    }
  }

  // The diagonal of Y E^T.
  template <int warp>
  __device__ __forceinline__ void write_beta(const ChunkOfHead& at, const float (&products)[kStepBlocks][4],
                                             const FragmentLane& lane) const {
    if (lane.pair != lane.quad / 2) return;
    float* const target = at.template rows<float>(p.grad_beta, at.head, at.chunk);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&block)[4] = products[2 * warp + half];
      const int row = lane.row + 8 * half;
      if (row < at.steps()) target[row * p.grad_beta.stride_step] = lane.quad % 2 == 0 ? block[2 * half] : block[2 * half + 1];
    }
  }

 private:
  // Adds the sums of the key head's earlier value heads. Returns whether this is the last one; else keeps the sums.
  __device__ __forceinline__ bool add_value_head(float (&d)[kColumnBlocks][4], int value_head, int index) const {
    float4* const sums = reinterpret_cast<float4*>(p.sums) +
                         (blockIdx.x * kWarpgroups + index) * (kColumnBlocks * kWarpgroupThreads) +
                         threadIdx.x % kWarpgroupThreads;
    if (value_head > 0) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float4 sum = __ldcg(sums + n * kWarpgroupThreads);
        d[n][0] += sum.x;
        d[n][1] += sum.y;
        d[n][2] += sum.z;
        d[n][3] += sum.w;
      }
    }
    if (value_head + 1 == p.value_heads_per_key_head) return true;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      __stcg(sums + n * kWarpgroupThreads, float4{d[n][0], d[n][1], d[n][2], d[n][3]});
    }
    return false;
  }

  // Four lanes with a word each of four vectors exchange them: each lane then has a vector, the one of its number.
  static __device__ __forceinline__ uint4 exchange(const uint32_t (&words)[4], const FragmentLane& lane) {
    const bool is_odd = lane.pair % 2 != 0, is_second = lane.pair / 2 != 0;
    const uint32_t first = __shfl_xor_sync(kAllLanes, is_odd ? words[0] : words[1], 1),
                   second = __shfl_xor_sync(kAllLanes, is_odd ? words[2] : words[3], 1);
    // `low` holds vector pair % 2 and `high` vector 2 + pair % 2: the words of this lane and its partner.
    const uint32_t low[2] = {is_odd ? first : words[0], is_odd ? words[1] : first},
                   high[2] = {is_odd ? second : words[2], is_odd ? words[3] : second};
    uint32_t others[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) others[i] = __shfl_xor_sync(kAllLanes, is_second ? low[i] : high[i], 2);
    return is_second ? uint4{others[0], others[1], high[0], high[1]} : uint4{low[0], low[1], others[0], others[1]};
  }
};

}  // namespace ssm_kernels::delta_rule
