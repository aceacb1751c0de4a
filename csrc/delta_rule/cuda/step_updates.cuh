// Calls with several updates a step (DeltaProduct). Kernels count updates as steps, of which a step of the call has
// 2^log2_updates; q, out and the log decays have one row for all updates of a step. A query reads the state after the last of
// them, and the decay multiplies it before the first.
#pragma once

#include "cuda/chunked/span.cuh"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// The most rows of q and out in a chunk.
template <bool has_updates>
inline constexpr int kChunkRows = has_updates ? kChunk / 2 : kChunk;

template <typename Params>
__device__ __forceinline__ int rows_of_updates(const Params& p, int updates) {
  return updates >> p.log2_updates;
}
// The last update, in the chunk, of a row; rows past the chunk's last one have its last update.
template <typename Params>
__device__ __forceinline__ int last_update(const Params& p, int row) {
  return min((row + 1) << p.log2_updates, kChunk) - 1;
}
template <typename Params>
__device__ __forceinline__ bool is_first_update(const Params& p, int update) {
  return (update & ((1 << p.log2_updates) - 1)) == 0;
}
template <typename Params>
__device__ __forceinline__ bool is_last_update(const Params& p, int update) {
  return is_first_update(p, update + 1);
}

// The address of the row of a chunk's first update, in a tensor with a row for all updates of a step.
template <typename Element, typename Params>
__device__ __forceinline__ Element* step_rows(const Params& p, const ChunkSpan& span, const RowsView& view, int64_t head,
                                              int chunk) {
  return static_cast<Element*>(view.data) + span.batch * view.stride_batch +
         ((span.start + first_step(chunk)) >> p.log2_updates) * view.stride_step + head * view.stride_head;
}

}  // namespace ssm_kernels::delta_rule
