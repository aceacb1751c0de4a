// The tables of each chunk's steps (ChunkTable), and in backward the gradients of the gates from the sums of each chunk.
//
// A warp has a chunk, and a lane four steps of it.
#pragma once

#include <cuda_runtime.h>

#include "common/math.h"
#include "mlstm/cuda/chunks.h"
#include "mlstm/cuda/divisor.cuh"
#include "mlstm/cuda/sequences.cuh"
#include "mlstm/cuda/warps.cuh"

namespace ssm_kernels::mlstm {

constexpr int kTableWarps = 4, kLaneSteps = kMatrixChunk / cuda::kWarpSize;
static_assert(kLaneSteps == 4, "a lane loads and stores four numbers at once");

// The smallest log2 decay of a step: 2 to this power is zero in fp32, and sums over a chunk stay exact enough.
constexpr float kLeastLog2 = -200;
// After a step with a smaller log2 decay, running sums over pairs are smaller than their rounding errors.
constexpr float kForgetsSumsLog2 = -24;

// A warp's chunk of a line.
struct ChunkOfWarp {
  int64_t number, entry, head, begin;
  int lane;

  __device__ __forceinline__ ChunkOfWarp(const ChunkParams& p, int64_t first)
      : number(warp_number<kTableWarps>(first)), lane(threadIdx.x % cuda::kWarpSize) {
    const int64_t line = number / p.chunks;
    entry = p.first_entry + line / p.part_heads;
    head = p.first_head + line % p.part_heads;
    begin = (number - line * p.chunks) * kMatrixChunk;
  }
  __device__ __forceinline__ int step(int i) const { return kLaneSteps * lane + i; }
  __device__ __forceinline__ bool is_there(const ChunkParams& p, int i) const { return begin + step(i) < p.seqlen; }
  __device__ __forceinline__ int64_t place(const ChunkParams& p, int i) const {
    return (entry * p.seqlen + begin + step(i)) * p.heads + head;
  }
};

// Sums along the steps of a chunk that start again at some of them.
struct RunningSum {
  float sum = 0;
  int first = -1;  // the last step at which the sum started again

  __device__ __forceinline__ RunningSum after(const RunningSum& before) const {
    return first >= 0 ? *this : RunningSum{before.sum + sum, before.first};
  }
  // The composition of the sums of all lanes before this one.
  __device__ __forceinline__ RunningSum of_earlier_lanes(int lane) const {
    RunningSum result = *this;
#pragma unroll
    for (int distance = 1; distance < cuda::kWarpSize; distance *= 2) {
      const RunningSum before{__shfl_up_sync(cuda::kAllLanes, result.sum, distance),
                              __shfl_up_sync(cuda::kAllLanes, result.first, distance)};
      if (lane >= distance) result = result.after(before);
    }
    const RunningSum before{__shfl_up_sync(cuda::kAllLanes, result.sum, 1), __shfl_up_sync(cuda::kAllLanes, result.first, 1)};
    return lane == 0 ? RunningSum{} : before;
  }
};

__global__ void __launch_bounds__(kTableWarps* cuda::kWarpSize)
    mlstm_chunk_tables_kernel(const __grid_constant__ ChunkParams p, int64_t first) {
  const ChunkOfWarp chunk(p, first);
  if (chunk.number >= p.lines() * p.chunks) return;
  float log2_decay[kLaneSteps], gain[kLaneSteps], factor[kLaneSteps], floor[kLaneSteps], to_end[kLaneSteps],
      from_start[kLaneSteps];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneSteps; ++i) {
    gain[i] = factor[i] = floor[i] = 0;
    if (chunk.is_there(p, i)) {
      const int64_t place = chunk.place(p, i);
      const float log2 = p.log_decay[place] * static_cast<float>(kLog2E);
      sum += log2 < kLeastLog2 ? kLeastLog2 : log2;  // NaN stays
      gain[i] = p.gain[place];
      if (p.divisor != nullptr || p.normalizers != nullptr) floor[i] = Math<float>::exp(-p.m[place]);
      factor[i] = p.normalizers != nullptr ? 1.0f : static_cast<float>(p.scale);
      if (p.divisor != nullptr) factor[i] /= divisor_size(p.divisor[place], floor[i]) + static_cast<float>(p.eps);
    }
    log2_decay[i] = sum;
  }
#pragma unroll
  for (int distance = 1; distance < cuda::kWarpSize; distance *= 2) {
    const float before = __shfl_up_sync(cuda::kAllLanes, sum, distance);
    if (chunk.lane >= distance) sum += before;
  }
  const float before = __shfl_up_sync(cuda::kAllLanes, sum, 1),
              of_last = __shfl_sync(cuda::kAllLanes, sum, cuda::kWarpSize - 1);
  if (chunk.lane == 0) p.decays[chunk.number] = Math<float>::exp2(of_last);
#pragma unroll
  for (int i = 0; i < kLaneSteps; ++i) {
    if (chunk.lane > 0) log2_decay[i] += before;
    to_end[i] = gain[i] * Math<float>::exp2(of_last - log2_decay[i]);
    from_start[i] = factor[i] * Math<float>::exp2(log2_decay[i]);
  }
  const auto store = [&](ChunkTable table, const float (&values)[kLaneSteps]) {
    float* const target = p.tables + (chunk.number * kChunkTables + table) * kMatrixChunk + kLaneSteps * chunk.lane;
    *reinterpret_cast<float4*>(target) = {values[0], values[1], values[2], values[3]};
  };
  store(kTableLog2Decay, log2_decay);
  store(kTableGain, gain);
  store(kTableFactor, factor);
  store(kTableFloor, floor);
  store(kTableToEnd, to_end);
  store(kTableFromStart, from_start);

  if (p.end_tables == nullptr) return;
  const int begin = static_cast<int>(chunk.begin);
  SequenceEnds ends(p.cu_seqlens, static_cast<int>(p.sequences), begin, min(begin + kMatrixChunk, static_cast<int>(p.seqlen)));
  for (; ends.find_inside(); ends.advance()) {
    const int last = ends.last_step();
    float log2_end = 0;
#pragma unroll
    for (int i = 0; i < kLaneSteps; ++i) {
      const float of_step = __shfl_sync(cuda::kAllLanes, log2_decay[i], last / kLaneSteps);
      if (i == last % kLaneSteps) log2_end = of_step;
    }
    float to_this_end[kLaneSteps];
#pragma unroll
    for (int i = 0; i < kLaneSteps; ++i) {
      to_this_end[i] = chunk.step(i) <= last ? gain[i] * Math<float>::exp2(log2_end - log2_decay[i]) : 0.0f;
    }
    const int64_t place = chunk.number / p.chunks * p.sequences + ends.number();
    float* const target = p.end_tables + place * kMatrixChunk + kLaneSteps * chunk.lane;
    *reinterpret_cast<float4*>(target) = {to_this_end[0], to_this_end[1], to_this_end[2], to_this_end[3]};
    if (chunk.lane == 0) p.end_decays[place] = Math<float>::exp2(log2_end);
  }
}

// The gradients of the log decays: of a step t, the sum over the pairs (j, i) with j < t <= i.
__global__ void __launch_bounds__(kTableWarps* cuda::kWarpSize)
    mlstm_gate_gradients_kernel(const __grid_constant__ ChunkParams p, int64_t first) {
  const ChunkOfWarp chunk(p, first);
  if (chunk.number >= p.lines() * p.chunks) return;
  const auto load = [&](ChunkSum sum) {
    return *reinterpret_cast<const float4*>(p.sums + (chunk.number * kChunkSums + sum) * kMatrixChunk +
                                            kLaneSteps * chunk.lane);
  };
  const float4 vectors[kChunkSums] = {load(kSumFromState), load(kSumEarlier), load(kSumSame), load(kSumToEnd), load(kSumLater)};
  const auto at = [&](ChunkSum sum, int i) {
    const float4& v = vectors[sum];
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  };
  // Pairs of steps before the chunk and after it.
  float through = 0;
  const int parts = static_cast<int>(p.value_dim / 16);
  for (int i = chunk.lane; i < parts; i += cuda::kWarpSize) through += p.products[chunk.number * parts + i];
#pragma unroll
  for (int distance = cuda::kWarpSize / 2; distance > 0; distance /= 2) {
    through += __shfl_xor_sync(cuda::kAllLanes, through, distance);
  }
  through *= p.decays[chunk.number];

  // Running sums before each step: of pairs of the chunk, which start again at a step that forgets, so that no rounding error
  // from before it remains, and of pairs from the chunk's steps to later ones. From each step on: of pairs from before the
  // chunk.
  RunningSum pairs, own_pairs[kLaneSteps];
  float to_later = 0, from_state = 0;
#pragma unroll
  for (int i = 0; i < kLaneSteps; ++i) {
    const bool forgets = chunk.is_there(p, i) && p.log_decay[chunk.place(p, i)] * static_cast<float>(kLog2E) < kForgetsSumsLog2;
    if (forgets) pairs = RunningSum{0, chunk.step(i)};
    own_pairs[i] = pairs;
    pairs.sum += at(kSumLater, i) - at(kSumEarlier, i);
    to_later += at(kSumToEnd, i);
    from_state += at(kSumFromState, i);
  }
  const RunningSum pairs_before = pairs.of_earlier_lanes(chunk.lane);
  float later_before = to_later, state_from = from_state;
#pragma unroll
  for (int distance = 1; distance < cuda::kWarpSize; distance *= 2) {
    const float more = __shfl_up_sync(cuda::kAllLanes, later_before, distance);
    const float more_state = __shfl_down_sync(cuda::kAllLanes, state_from, distance);
    if (chunk.lane >= distance) later_before += more;
    if (chunk.lane + distance < cuda::kWarpSize) state_from += more_state;
  }
  later_before = __shfl_up_sync(cuda::kAllLanes, later_before, 1);
  if (chunk.lane == 0) later_before = 0;
  state_from = __shfl_down_sync(cuda::kAllLanes, state_from, 1);
  if (chunk.lane == cuda::kWarpSize - 1) state_from = 0;
  float from_here[kLaneSteps];
#pragma unroll
  for (int i = kLaneSteps - 1; i >= 0; --i) from_here[i] = state_from += at(kSumFromState, i);
#pragma unroll
  for (int i = 0; i < kLaneSteps; ++i) {
    if (chunk.is_there(p, i)) {
      const int64_t place = chunk.place(p, i);
      p.grad_log_decay[place] = own_pairs[i].after(pairs_before).sum + later_before + from_here[i] + through;
      p.gain_times_grad[place] = at(kSumToEnd, i) + at(kSumLater, i) + at(kSumSame, i);
      p.out_products[place] = at(kSumFromState, i) + at(kSumEarlier, i) + at(kSumSame, i);
    }
    later_before += at(kSumToEnd, i);
  }
}

}  // namespace ssm_kernels::mlstm
