// The sums from which one warp computes the gradients of a chunk's log decays (bwd_chunks.cuh).
#pragma once

#include "delta_rule/cuda/bwd_workspace.cuh"

namespace ssm_kernels::delta_rule {

struct DecaySums {
  float pairs[kWarpgroups * kWarpgroupWarps][kChunk];  // of a warp's rows i: for each step t, over pairs j < t <= i
  float reads[kWarpgroups][kChunk], adds[kChunk];      // of each step, by q and by k, and by k
  float states[kWarpgroupWarps];                       // of <S, D>
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
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// For each step t the sum over the warp's rows i >= t of the elements in columns before t.
__device__ __forceinline__ void sum_pairs(const float (&terms)[kStepBlocks][4], float (&target)[kChunk],
                                          const FragmentLane& lane) {
  float before[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
    float of_steps[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = terms[n][2 * half];
      float sum = low + terms[n][2 * half + 1];
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        const float earlier = __shfl_up_sync(kAllLanes, sum, distance, 4);
        if (lane.pair >= distance) sum += earlier;
      }
      float earlier = __shfl_up_sync(kAllLanes, sum, 1, 4);
      earlier = before[half] + (lane.pair == 0 ? 0.0f : earlier);
      before[half] += __shfl_sync(kAllLanes, sum, 3, 4);
      const int distance = lane.row + 8 * half - (kBlockSteps * n + 2 * lane.pair);
      if (distance >= 0) of_steps[0] += earlier;
      if (distance >= 1) of_steps[1] += earlier + low;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        of_steps[i] += __shfl_xor_sync(kAllLanes, of_steps[i], distance);
      }
    }
    if (lane.quad == 0) *reinterpret_cast<float2*>(&target[kBlockSteps * n + 2 * lane.pair]) = {of_steps[0], of_steps[1]};
  }
}

// Run by one warp, of which each lane has two steps.
__device__ __forceinline__ void write_grad_log_decay(const DeltaRuleBwdParams& p, const ChunkOfHead& at, const DecaySums& sums,
                                                     const DeltaRuleTables& tables, const FragmentLane& lane) {
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
  float* const target = at.template rows<float>(p.grad_log_decay, at.head, at.chunk);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = 2 * lane.index + i;
    if (step < at.steps()) target[step * p.grad_log_decay.stride_step] = result[i];
  }
}

}  // namespace ssm_kernels::delta_rule
