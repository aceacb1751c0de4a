// How a segment acts on the state before it: h -> decay h + offset. Blocks that scan later segments fold the maps of earlier
// ones.
#pragma once

#include "cuda/carry.cuh"
#include "cuda/chunked/state.cuh"
#include "ssd/cuda/chunk_tables.cuh"

namespace ssm_kernels::ssd {

// Stands for the decay of a segment in which a sequence begins: nothing is left of the state before it.
constexpr float kReset = -1;
__device__ __forceinline__ void add_decay(const SsdParams& p, float& segment_decay, const ChunkTables& tables) {
  segment_decay = has_reset(p, tables) || segment_decay == kReset ? kReset : segment_decay * tables.chunk_decay;
}

// Summaries of segments for the state tiles: the state after the segment, begun with zero, in the order of the threads'
// registers, and the segment's decay.
template <int dstate>
struct SegmentSummaries {
  float *states, *decays;

  __device__ __forceinline__ float* registers_of(int index) const { return states + int64_t(index) * (kStateRows * dstate); }

  // Called by all threads of the warpgroup.
  __device__ __forceinline__ void store(const State<dstate>& after_zero, float decay, int index) const {
    after_zero.store_registers(registers_of(index));
    if (threadIdx.x % kWarpgroupThreads == 0) decays[index] = decay;
  }

  // Takes a state, or its blocks of columns from first_block on, through the segments of indices first, first + stride, ...
  // below end, in that order.
  template <int columns>
  __device__ __forceinline__ void fold_into(State<columns>& state, int first, int end, int stride, int first_block = 0) const {
#pragma unroll 1
    for (int index = first; index < end; index += stride) {
      const float decay = __ldcg(decays + index);
      const float* const source = registers_of(index) + first_block * (kWarpgroupThreads * 4);
      state.read_registers(source, [&](float (&values)[4], const float (&stored)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = cuda::AffineMap<float>{decay, stored[i]}(values[i], decay == kReset);
      });
    }
  }
};

}  // namespace ssm_kernels::ssd
