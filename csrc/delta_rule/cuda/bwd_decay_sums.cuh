// The sums from which one warp computes the gradients of a chunk's log decays (bwd_chunks.cuh).
#pragma once

#include "cuda/mma_tf32x3.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/step_updates.cuh"

namespace ssm_kernels::delta_rule {

struct DecaySums {
  float pairs[kWarpgroupWarps][kChunk];            // of a warp's rows i: for each step t, over pairs j < t <= i
  float reads[kWarpgroups][kChunk], adds[kChunk];  // of each step, by q and by k, and by k
  float states[kWarpgroupWarps];                   // of <S, D>
};

// Stores, for each of the lane's rows, the sum over the four lanes that share it.
__device__ __forceinline__ void put_row_sums(float (&sums)[2], float (&target)[kChunk], const FragmentLane& lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums[half] += __shfl_xor_sync(kAllLanes, sums[half], 1);
    sums[half] += __shfl_xor_sync(kAllLanes, sums[half], 2);
    if (lane.pair == 0) target[lane.row + 8 * half] = sums[half];
  }
}

// For each step t the sum over the warp's rows i >= t of the elements in columns before t; elements above the diagonal are
// zero. Products with ones are the sums along rows, of elements as TF32: rounded for fp16, and else truncated. Then lanes
// exchange halves of what they have, so that each ends with two steps.
template <typename Scalar>
__device__ __forceinline__ void sum_pairs(const float (&terms)[kStepBlocks][4], float (&target)[kChunk],
                                          const FragmentLane& lane) {
  const uint32_t one = __float_as_uint(1.0f), ones[2] = {one, one},
                 before[2] = {2 * lane.pair < lane.quad ? one : 0, 2 * lane.pair + 1 < lane.quad ? one : 0};
  float sums[kStepBlocks][2], of_blocks_before[4] = {0, 0, 0, 0};
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
    const float elements[4] = {terms[n][0], terms[n][2], terms[n][1], terms[n][3]};
    uint32_t block[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      block[i] = __float_as_uint(elements[i]);
      if (std::is_same_v<Scalar, __half>) block[i] = cuda::add_half_unit(block[i]);
    }
    float of_rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_rows[i] = of_blocks_before[i];
    cuda::mma_tf32(of_rows, block, before);
    cuda::mma_tf32(of_blocks_before, block, ones);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int distance = lane.row - (kBlockSteps * n + 2 * lane.pair + i);
      sums[n][i] = (distance >= 0 ? of_rows[i] : 0.0f) + (distance + 8 >= 0 ? of_rows[2 + i] : 0.0f);
    }
  }
  // A lane keeps the blocks whose number has the same bit as its quad.
#pragma unroll
  for (int bit = kStepBlocks / 2; bit > 0; bit /= 2) {
    const bool is_high = (lane.quad & bit) != 0;
#pragma unroll
    for (int n = 0; n < bit; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float kept = is_high ? sums[n + bit][i] : sums[n][i], sent = is_high ? sums[n][i] : sums[n + bit][i];
        sums[n][i] = kept + __shfl_xor_sync(kAllLanes, sent, 4 * bit);
      }
    }
  }
  *reinterpret_cast<float2*>(&target[kBlockSteps * lane.quad + 2 * lane.pair]) = {sums[0][0], sums[0][1]};
}

// Writes to rows of one element. Run by one warp, of which each lane has two steps.
__device__ __forceinline__ void write_grad_log_decay(const DeltaRuleBwdParams& p, const RowsView& view, const ChunkOfHead& at,
                                                     const DecaySums& sums, const ChunkTables& tables,
                                                     const FragmentLane& lane) {
  const auto pair_of = [&](const float (&table)[kChunk]) { return reinterpret_cast<const float2*>(table)[lane.index]; };
  float result[2] = {0, 0};
#pragma unroll
  for (const auto& pairs : sums.pairs) {
    const float2 pair = pair_of(pairs);
    result[0] += pair.x;
    result[1] += pair.y;
  }
  float of_states = 0;
#pragma unroll
  for (const float part : sums.states) of_states += part;
  if (tables.chunk_decay == 0.0f) {
    of_states = 0;
  } else {
    of_states *= tables.chunk_decay;
  }
  float2 reads = pair_of(sums.reads[0]);
  const float2 reads_by_keys = pair_of(sums.reads[1]), adds = pair_of(sums.adds);
  reads.x += reads_by_keys.x;
  reads.y += reads_by_keys.y;
  float later = reads.x + reads.y, earlier = adds.x + adds.y;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const float from_later = __shfl_down_sync(kAllLanes, later, distance),
                from_earlier = __shfl_up_sync(kAllLanes, earlier, distance);
    if (lane.index + distance < kWarpSize) later += from_later;
    if (lane.index >= distance) earlier += from_earlier;
  }
  float after = __shfl_down_sync(kAllLanes, later, 1), before = __shfl_up_sync(kAllLanes, earlier, 1);
  if (lane.index == kWarpSize - 1) after = 0;
  if (lane.index == 0) before = 0;
  result[0] += (later + before) + of_states;
  result[1] += (reads.y + after) + (before + adds.x) + of_states;
  float* const target = step_rows<float>(p, at, view, at.head, at.chunk);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = 2 * lane.index + i;
    if (step < at.steps() && is_first_update(p, step)) {
      target[(step >> p.log2_updates) * view.stride_step] = result[i];
    }
  }
}

}  // namespace ssm_kernels::delta_rule
