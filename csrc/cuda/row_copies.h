// Copies of rows between tensors whose rows may start at any element, such as columns of a wider tensor, and tensors whose rows
// are padded with zeros to whole vectors. One launch copies several tensors, of any types with elements of 2 or 4 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/integers.h"
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

constexpr int kMaxRowCopies = 8, kTilePieces = 2048, kBlockBytes = 16;

// Some copies, with how the kernel divides them: into pieces, the 16-byte blocks of memory that hold a target row, and tiles,
// the pieces of some entries of the second axis.
struct RowCopies {
  struct Entry : RowCopy {
    Divisor pieces_per_row, pieces_per_step;
    int64_t first_tile = 0, tiles_per_batch = 0;
    int steps_per_tile = 0;
  };
  Entry entries[kMaxRowCopies];
  int count = 0;
  int64_t tiles = 0;

  // Returns false, and adds nothing, if there is no room. A copy of no elements takes no room.
  bool add(const RowCopy& copy);
};

inline bool RowCopies::add(const RowCopy& copy) {
  if (copy.sizes[0] * copy.sizes[1] * copy.sizes[2] == 0 || copy.written_bytes == 0) return true;
  if (count == kMaxRowCopies) return false;
  Entry& entry = entries[count++];
  static_cast<RowCopy&>(entry) = copy;
  // Rows that follow one another in both tensors are one: it has fewer first and last pieces.
  int64_t joined = entry.written_bytes * entry.sizes[2];
  if (entry.row_bytes == entry.written_bytes && entry.source_strides[2] == entry.row_bytes &&
      entry.target_strides[2] == entry.row_bytes && joined < std::numeric_limits<int32_t>::max() / 2) {
    entry.row_bytes = entry.written_bytes = static_cast<int>(joined);
    entry.sizes[2] = 1;
  }
  bool is_aligned = reinterpret_cast<uintptr_t>(entry.target) % kBlockBytes == 0;
  for (int axis = 0; axis < RowCopy::kAxes; ++axis) {
    is_aligned &= entry.sizes[axis] == 1 || entry.target_strides[axis] % kBlockBytes == 0;
  }
  // A target row that starts inside a block has bytes in one more.
  const int64_t per_row = ceil_div(entry.written_bytes + (is_aligned ? 0 : kBlockBytes - 1), kBlockBytes);
  const int64_t per_step = per_row * entry.sizes[2];
  entry.pieces_per_row = Divisor(per_row);
  entry.pieces_per_step = Divisor(per_step);
  entry.steps_per_tile = static_cast<int>(std::max<int64_t>(1, std::min(kTilePieces / per_step, entry.sizes[1])));
  entry.tiles_per_batch = ceil_div(entry.sizes[1], entry.steps_per_tile);
  entry.first_tile = tiles;
  tiles += entry.sizes[0] * entry.tiles_per_batch;
  return true;
}

// Queues the kernel; no source may overlap with a target.
cudaError_t launch_row_copies(const RowCopies& copies, cudaStream_t stream);

}  // namespace ssm_kernels::cuda
