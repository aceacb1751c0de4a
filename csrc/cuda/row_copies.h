// Copies of rows between tensors whose rows may start at any element, such as columns of a wider tensor, and tensors whose rows
// are padded with zeros to whole vectors. One launch copies several tensors, of any types with elements of 2 or 4 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/integers.h"
#include "common/kernel_abi.h"
#include "common/macros.h"
#include "cuda/divisor.h"

namespace ssm_kernels::cuda {

// Sizes and strides of the three axes before a row; strides are in bytes. The sizes are the target's. The target's rows get
// row_bytes of the source, then zeros up to written_bytes, both multiples of the element size.
struct RowCopy {
  static constexpr int kAxes = 3;
  const char* source = nullptr;
  char* target = nullptr;
  int64_t sizes[kAxes] = {1, 1, 1};
  int64_t source_strides[kAxes] = {}, target_strides[kAxes] = {};
  int row_bytes = 0, written_bytes = 0;
};

constexpr int kMaxRowCopies = 8, kTilePieces = 1024, kBlockBytes = 16;

// Some copies, with how the kernel divides them: into pieces, the 16-byte blocks of memory that hold a span of the target, and
// tiles, the pieces of some entries of the second axis. A span is a target row. Where these are no whole blocks and follow one
// another, it is all rows of an entry of the second axis, so that few pieces are stored by parts of a block.
struct RowCopies {
  struct Entry : RowCopy {
    Divisor pieces_per_span, pieces_per_step, row;
    int64_t first_tile = 0, tiles_per_batch = 0;
    int steps_per_tile = 0, rows_per_span = 1, span_bytes = 0;
    bool has_blocks = false;           // whether target rows are whole blocks
    const char* source_end = nullptr;  // after the last byte of the source

    // After the last byte of some entries of the second axis, of which the first begins at `first`.
    SSM_HOST_DEVICE const char* end_of_rows(const char* first, int64_t steps) const {
      const int64_t to_step = (steps - 1) * source_strides[1], to_row = (sizes[2] - 1) * source_strides[2];
      return first + (to_step > 0 ? to_step : 0) + (to_row > 0 ? to_row : 0) + row_bytes;
    }
  };
  Entry entries[kMaxRowCopies];
  int count = 0;
  int64_t tiles = 0;

  // Adds a copy. Returns false, without adding it, if the array of entries is full. A copy of no elements takes no entry.
  bool add(const RowCopy& copy);
};

inline bool RowCopies::add(const RowCopy& copy) {
  if (copy.sizes[0] * copy.sizes[1] * copy.sizes[2] == 0 || copy.written_bytes == 0) return true;
  if (count == kMaxRowCopies) return false;
  Entry& entry = entries[count++];
  static_cast<RowCopy&>(entry) = copy;
  entry.source_end =
      entry.end_of_rows(entry.source + std::max<int64_t>(0, (entry.sizes[0] - 1) * entry.source_strides[0]), entry.sizes[1]);
  // Rows that follow one another in both tensors are one.
  const int64_t joined = entry.written_bytes * entry.sizes[2];
  const bool is_joined = entry.target_strides[2] == entry.written_bytes && joined < std::numeric_limits<int32_t>::max() / 2;
  if (is_joined && entry.row_bytes == entry.written_bytes && entry.source_strides[2] == entry.row_bytes) {
    entry.row_bytes = entry.written_bytes = static_cast<int>(joined);
    entry.sizes[2] = 1;
  }
  bool is_aligned = reinterpret_cast<uintptr_t>(entry.target) % kBlockBytes == 0;
  for (int axis = 0; axis < 2; ++axis) {
    is_aligned &= entry.sizes[axis] == 1 || entry.target_strides[axis] % kBlockBytes == 0;
  }
  const bool are_rows_aligned = is_aligned && (entry.sizes[2] == 1 || entry.target_strides[2] % kBlockBytes == 0);
  entry.has_blocks = are_rows_aligned && entry.written_bytes % kBlockBytes == 0;
  if (is_joined && !entry.has_blocks) entry.rows_per_span = static_cast<int>(entry.sizes[2]);
  entry.span_bytes = entry.written_bytes * entry.rows_per_span;
  // A span that starts inside a block has bytes in one more.
  const bool starts_blocks = entry.rows_per_span == 1 ? are_rows_aligned : is_aligned;
  const int64_t per_span = ceil_div(entry.span_bytes + (starts_blocks ? 0 : kBlockBytes - 1), kBlockBytes);
  const int64_t per_step = per_span * (entry.sizes[2] / entry.rows_per_span);
  entry.row = Divisor(entry.written_bytes);
  entry.pieces_per_span = Divisor(per_span);
  entry.pieces_per_step = Divisor(per_step);
  entry.steps_per_tile = static_cast<int>(std::max<int64_t>(1, std::min(kTilePieces / per_step, entry.sizes[1])));
  entry.tiles_per_batch = ceil_div(entry.sizes[1], entry.steps_per_tile);
  entry.first_tile = tiles;
  tiles += entry.sizes[0] * entry.tiles_per_batch;
  return true;
}

// Queues the kernel; no source may overlap with a target.
SSM_KERNEL_API cudaError_t launch_row_copies(const RowCopies& copies, cudaStream_t stream);

SSM_KERNEL_STRUCT(RowCopies, 1488);

}  // namespace ssm_kernels::cuda
