// How a segment of a sequence acts on the state before it: it maps the state linearly, and adds the state that it leaves when
// it begins with zero. Blocks that scan later segments fold the maps of earlier ones, in order.
//
// The linear part is a type, `Map`. It describes the map of no step at first, and provides:
//
//   append(p, tables)                      composes it with the map of the next chunk.
//   apply(element, offset)                 an element of the state after the segment, from that before it.
//   store(maps, index), load(maps, index)  for the workspace WorkPartition::maps.
//
// ScalarMap is for the decay of a head. With a decay for each column of the state, apply() would also take the column; the
// maps of delta rules are matrices, which delta_rule/cuda/segment_fold.cuh folds.
#pragma once

#include "cuda/carry.cuh"
#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/chunked/state.cuh"

namespace ssm_kernels::cuda::chunked {

// h -> decay h.
struct ScalarMap {
  // Stands for the decay of a segment in which a sequence begins: nothing is left of the state before it.
  static constexpr float kReset = -1;
  float decay = 1;

  template <typename Params>
  __device__ __forceinline__ void append(const Params& p, const ChunkTables& tables) {
    decay = has_reset(p, tables) || decay == kReset ? kReset : decay * tables.chunk_decay;
  }
  __device__ __forceinline__ float apply(float element, float offset) const {
    return AffineMap<float>{decay, offset}(element, decay == kReset);
  }
  __device__ __forceinline__ void store(float* maps, int index) const { maps[index] = decay; }
  static __device__ __forceinline__ ScalarMap load(const float* maps, int index) { return {__ldcg(maps + index)}; }
};

// A scan whose work tiles are no longer than a range has no map: none of its blocks folds.
struct NoMap {};

// Summaries of segments for the state tiles: the state after the segment, begun with zero, in the order of the threads'
// registers, and the segment's map.
template <int dstate, typename Map>
struct SegmentSummaries {
  float *states, *maps;

  __device__ __forceinline__ float* registers_of(int index) const { return states + int64_t(index) * (kStateRows * dstate); }

  // Called by all threads of the warpgroup.
  __device__ __forceinline__ void store(const State<dstate>& after_zero, const Map& map, int index) const {
    after_zero.store_registers(registers_of(index));
    if (threadIdx.x % kWarpgroupThreads == 0) map.store(maps, index);
  }

  // Takes a state, or its blocks of columns from first_block on, through the segments of indices first, first + stride, ...
  // below end, in that order.
  template <int columns>
  __device__ __forceinline__ void fold_into(State<columns>& state, int first, int end, int stride, int first_block = 0) const {
#pragma unroll 1
    for (int index = first; index < end; index += stride) {
      const Map map = Map::load(maps, index);
      const float* const source = registers_of(index) + first_block * (kWarpgroupThreads * 4);
      state.read_registers(source, [&](float (&values)[4], const float (&stored)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = map.apply(values[i], stored[i]);
      });
    }
  }
};

}  // namespace ssm_kernels::cuda::chunked
