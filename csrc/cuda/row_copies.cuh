// Copies rows that start at any element (row_copies.h) at the rate of memory.
//
// A thread has a piece: an aligned block of 16 bytes of a target row. It loads the one or two aligned blocks that hold the
// piece's bytes in the source, shifts them together and stores 16 bytes; neighboring lanes share the second block in the L1
// cache. Only a target row's first and last pieces may be stored by words and halves of words. Pieces of a tile are numbered
// along rows first. A block of threads takes one tile after another, and each thread loads kAtOnce pieces before it stores the
// first. Source blocks may begin before a row, in the same 16 bytes as its first element, but nothing is read beyond its end.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/constants.h"
#include "cuda/row_copies.h"

namespace ssm_kernels::cuda {

constexpr int kCopyThreads = 256, kCopiesAtOnce = 4;
static_assert(kTilePieces % (kCopyThreads * kCopiesAtOnce) == 0, "threads of a full tile have equally many pieces");

// The part [low, high) of an aligned block of 16 bytes that belongs to a row, in bytes from the block's start: it may begin
// before the block or end after it.
__device__ __forceinline__ uint4 load_row_block(const char* block, int low, int high) {
  uint32_t words[4] = {};
  if (low >= kBlockBytes || high <= low) return {0, 0, 0, 0};
  if (high >= kBlockBytes) return *reinterpret_cast<const uint4*>(block);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (4 * k + 4 <= high) {
      words[k] = reinterpret_cast<const uint32_t*>(block)[k];
    } else if (4 * k + 2 <= high) {
      words[k] = reinterpret_cast<const uint16_t*>(block)[2 * k];
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// The 16 bytes that begin `past` bytes, an even number below 16, after the start of two neighboring blocks.
__device__ __forceinline__ uint4 shift_blocks(const uint4& block, const uint4& next, int past) {
  const uint32_t words[8] = {block.x, block.y, block.z, block.w, next.x, next.y, next.z, next.w};
  uint32_t by_two[6], by_one[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_two[i] = (past & 8) != 0 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_one[i] = (past & 4) != 0 ? by_two[i + 1] : by_two[i];
  const unsigned int selected = (past & 2) != 0 ? 0x5432 : 0x3210;
  return {__byte_perm(by_one[0], by_one[1], selected), __byte_perm(by_one[1], by_one[2], selected),
          __byte_perm(by_one[2], by_one[3], selected), __byte_perm(by_one[3], by_one[4], selected)};
}

struct RowPiece {
  char* target;  // an aligned block, of which bytes [begin, end) are written
  int begin, end, past;
  uint4 block, next;

  // The piece at that number of a target row, from the source row.
  __device__ __forceinline__ void load(const RowCopy& copy, const char* source_row, char* target_row, int number) {
    constexpr int kMask = kBlockBytes - 1;
    const int target_past = static_cast<int>(reinterpret_cast<uintptr_t>(target_row)) & kMask,
              source_past = static_cast<int>(reinterpret_cast<uintptr_t>(source_row)) & kMask;
    const int offset = number * kBlockBytes - target_past;  // of the block, in the row
    target = target_row + offset;
    begin = max(0, -offset);
    end = min(kBlockBytes, copy.written_bytes - offset);
    const int position = source_past + offset;  // of its bytes in the source, from the first aligned block on
    past = position & kMask;
    const int first = position - past;
    const char* const source = source_row - source_past + first;
    const int low = source_past - first, high = end > begin ? low + copy.row_bytes : low;
    block = load_row_block(source, low, high);
    next = past != 0 ? load_row_block(source + kBlockBytes, low - kBlockBytes, high - kBlockBytes) : uint4{0, 0, 0, 0};
  }

  __device__ __forceinline__ void store() const {
    if (end <= begin) return;
    const uint4 shifted = shift_blocks(block, next, past);
    if (begin == 0 && end == kBlockBytes) {
      *reinterpret_cast<uint4*>(target) = shifted;
      return;
    }
    const uint32_t words[4] = {shifted.x, shifted.y, shifted.z, shifted.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool has_low = begin <= 4 * k && 4 * k + 2 <= end, has_high = begin <= 4 * k + 2 && 4 * k + 4 <= end;
      if (has_low && has_high) {
        reinterpret_cast<uint32_t*>(target)[k] = words[k];
      } else if (has_low) {
        reinterpret_cast<uint16_t*>(target)[2 * k] = static_cast<uint16_t>(words[k]);
      } else if (has_high) {
        reinterpret_cast<uint16_t*>(target)[2 * k + 1] = static_cast<uint16_t>(words[k] >> 16);
      }
    }
  }
};

__global__ void __launch_bounds__(kCopyThreads) row_copies_kernel(const __grid_constant__ RowCopies p) {
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    int number = 0;
    while (number + 1 < p.count && tile >= p.entries[number + 1].first_tile) ++number;
    const RowCopies::Entry& copy = p.entries[number];
    const int64_t tile_of_copy = tile - copy.first_tile, batch = tile_of_copy / copy.tiles_per_batch,
                  first_step = (tile_of_copy - batch * copy.tiles_per_batch) * copy.steps_per_tile;
    const auto steps = static_cast<uint32_t>(min(int64_t(copy.steps_per_tile), copy.sizes[1] - first_step));
    const char* const source = copy.source + batch * copy.source_strides[0] + first_step * copy.source_strides[1];
    char* const target = copy.target + batch * copy.target_strides[0] + first_step * copy.target_strides[1];
    const auto per_step = copy.pieces_per_step.value<uint32_t>(), per_row = copy.pieces_per_row.value<uint32_t>();
    const uint32_t pieces = steps * per_step;
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < pieces; first += kCopyThreads * kCopiesAtOnce) {
      RowPiece at[kCopiesAtOnce];
#pragma unroll
      for (int k = 0; k < kCopiesAtOnce; ++k) {
        const uint32_t i = first + k * kCopyThreads;
        if (i >= pieces) {
          at[k].begin = at[k].end = 0;
          continue;
        }
        const uint32_t step = copy.pieces_per_step.divide(i), in_step = i - step * per_step,
                       row = copy.pieces_per_row.divide(in_step), in_row = in_step - row * per_row;
        at[k].load(copy, source + step * copy.source_strides[1] + row * copy.source_strides[2],
                   target + step * copy.target_strides[1] + row * copy.target_strides[2], static_cast<int>(in_row));
      }
#pragma unroll
      for (int k = 0; k < kCopiesAtOnce; ++k) at[k].store();
    }
  }
}

cudaError_t launch_row_copies(const RowCopies& copies, cudaStream_t stream) {
  if (copies.count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(copies.tiles, std::numeric_limits<int32_t>::max()));
  row_copies_kernel<<<blocks, kCopyThreads, 0, stream>>>(copies);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::cuda
