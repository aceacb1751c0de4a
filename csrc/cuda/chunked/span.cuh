// Where a block works: consecutive chunks of a sequence (ChunkSpan) or of a work tile (WorkSpan), and a state tile of its two
// (StateTile). The numbers of the chunks of all sequences, which index workspaces.
#pragma once

#include "cuda/chunked/geometry.h"

namespace ssm_kernels::cuda::chunked {

// Whether sequences are packed: read at run time, or known from the type of the parameters.
template <typename Params>
__device__ __forceinline__ bool is_packed(const Params& p) {
  return p.cu_seqlens != nullptr;
}
template <typename Params>
__device__ __forceinline__ constexpr bool is_packed(const Packed<Params>&) {
  return true;
}
template <typename Params>
__device__ __forceinline__ constexpr bool is_packed(const Unpacked<Params>&) {
  return false;
}

// Consecutive chunks of a sequence.
struct ChunkSpan {
  int64_t entry;  // the row of the batch, or the packed sequence
  int64_t batch;
  int64_t start, length;  // the first step in the row of the batch, and the steps from there to the end of the sequence
  int chunks;

  // The whole sequence.
  template <typename Params>
  __device__ __forceinline__ ChunkSpan(const Params& p, int64_t entry) : entry(entry) {
    start = is_packed(p) ? sequence_start(p, entry) : 0;
    batch = is_packed(p) ? 0 : entry;
    length = is_packed(p) ? max(int64_t(0), sequence_start(p, entry + 1) - start) : p.seqlen;
    chunks = static_cast<int>((length + kChunk - 1) / kChunk);
  }

  // Clamped to the tensors: during the capture of a graph nobody checks cu_seqlens.
  template <typename Params>
  static __device__ __forceinline__ int64_t sequence_start(const Params& p, int64_t entry) {
    return max(int64_t(0), min(p.cu_seqlens[entry], p.seqlen));
  }

  __device__ __forceinline__ void narrow(int first, int count) {
    start += first_step(first);
    length -= first_step(first);
    chunks = count;
  }

  // The number of steps in a chunk.
  __device__ __forceinline__ int steps_of(int chunk) const {
    return static_cast<int>(min(int64_t(kChunk), length - first_step(chunk)));
  }

  template <typename Scalar>
  __device__ __forceinline__ Scalar* rows(const RowsView& view, int64_t head_or_group, int chunk) const {
    return static_cast<Scalar*>(view.data) + batch * view.stride_batch + step_of(chunk) * view.stride_step +
           head_or_group * view.stride_head;
  }
  template <typename Params>
  __device__ __forceinline__ const uint8_t* resets(const Params& p, int chunk) const {
    return p.resets == nullptr ? nullptr : p.resets + batch * p.seqlen + step_of(chunk);
  }

 private:
  __device__ __forceinline__ int64_t step_of(int chunk) const { return start + first_step(chunk); }
};

// Consecutive chunks of a work tile. There are fewer than 2^31 work tiles.
struct WorkSpan : ChunkSpan {
  int group;
  int first_tile;  // the first state tile, among the group's

  // The whole work tile.
  template <typename Params>
  __device__ __forceinline__ WorkSpan(const Params& p, const WorkPartition& partition, int work_tile)
      : ChunkSpan(p, work_tile / partition.work_tiles_per_entry),
        group(work_tile / partition.work_tiles_per_group % static_cast<int>(p.groups)),
        first_tile(work_tile % partition.work_tiles_per_group * kWarpgroups) {}
};

// One of a block's two state tiles: up to kStateRows rows and kStateColumns columns of one head's state.
struct StateTile {
  int head;
  int first_row, first_column;  // of the head's state
  int rows;                     // the head's from first_row on; 0 if the group has no more state tiles

  __device__ __forceinline__ StateTile(const ChunkedGeometry& p, const WorkPartition& partition, const WorkSpan& at,
                                       int index) {
    const bool is_there = at.first_tile + index < partition.tiles_per_group;
    const int state_tile = (at.first_tile + index) / partition.column_blocks;
    first_column = (at.first_tile + index) % partition.column_blocks * kStateColumns;
    head = at.group * partition.heads_per_group + (is_there ? state_tile / partition.row_blocks : 0);
    first_row = is_there ? state_tile % partition.row_blocks * kStateRows : 0;
    rows = is_there ? p.headdim - first_row : 0;
  }
  __device__ __forceinline__ bool is_there() const { return rows > 0; }
};

// The chunk number of a sequence's first chunk.
template <typename Params>
__device__ __forceinline__ int64_t first_chunk_index(const Params& p, int64_t entry) {
  if (is_packed(p)) return ChunkSpan::sequence_start(p, entry) / kChunk + entry;
  return entry * ((p.seqlen + kChunk - 1) / kChunk);
}

// The sequence of a chunk number. With packed sequences some numbers belong to none.
template <typename Params>
__device__ __forceinline__ int64_t sequence_of_chunk(const Params& p, int64_t chunk_index) {
  if (!is_packed(p)) return chunk_index / ((p.seqlen + kChunk - 1) / kChunk);
  int64_t low = 0, high = p.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_chunk_index(p, middle) <= chunk_index ? low : high) = middle;
  }
  return low;
}

}  // namespace ssm_kernels::cuda::chunked
