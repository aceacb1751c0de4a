// Copies rows that start at any element (row_copies.h) at the rate of memory.
//
// A thread has a piece: an aligned block of 16 bytes of the target. Its bytes come from one row of the source or, where target
// rows are no whole blocks, from several. For each of these rows the thread loads the one or two aligned blocks of memory that
// hold its bytes, and shifts them together; neighboring lanes share the second block in the L1 cache. Only a span's first and
// last pieces may be stored by halves of words. Pieces of a tile are numbered along spans first. A block of threads takes one
// tile after another, and each thread loads several pieces before it stores the first. An aligned block that holds a byte of a
// row is loaded whole, and the bytes beside the row are dropped. Nothing is read after the source's last byte: the tiles that
// may hold it test the end of each block.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/constants.h"
#include "cuda/row_copies.h"

namespace ssm_kernels::cuda {

// Pieces that a thread loads at once, with bytes of one row or of several.
constexpr int kCopyThreads = 256, kRowPiecesAtOnce = 4, kMixedPiecesAtOnce = 2;
static_assert(kTilePieces % (kCopyThreads * kRowPiecesAtOnce) == 0, "threads of a full tile have equally many pieces");

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

// An aligned block. With `has_end`, without what is after `end`.
template <bool has_end>
__device__ __forceinline__ uint4 load_block(const uint4* block, const char* end) {
  const auto left = static_cast<int64_t>(reinterpret_cast<uintptr_t>(end) - reinterpret_cast<uintptr_t>(block));
  if (!has_end || left >= kBlockBytes) return *block;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kBlockBytes / 2; ++i) {
    if (2 * i < left) words[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(block)[i]) << (i % 2 * 16);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A row's bytes [low, high) of a piece. The others become zeros.
struct RowPart {
  int low = 0, high = 0, past = 0;
  uint4 block = {}, next = {};

  // `source` is where the row would have the piece's first byte.
  template <bool has_end>
  __device__ __forceinline__ void load(const char* source, int first, int end, const char* source_end) {
    low = first;
    high = end;
    past = static_cast<int>(reinterpret_cast<uintptr_t>(source)) & (kBlockBytes - 1);
    const auto* const blocks = reinterpret_cast<const uint4*>(source - past);
    if (low < high && low + past < kBlockBytes) block = load_block<has_end>(blocks, source_end);
    if (low < high && high + past > kBlockBytes) next = load_block<has_end>(blocks + 1, source_end);
  }

  __device__ __forceinline__ uint4 value() const {
    uint4 result = shift_blocks(block, next, past);
    if (low > 0 || high < kBlockBytes) {
      uint32_t* const words = &result.x;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (low > 4 * k || high < 4 * k + 2) words[k] &= 0xffff0000;
        if (low > 4 * k + 2 || high < 4 * k + 4) words[k] &= 0x0000ffff;
      }
    }
    return result;
  }
};

// A piece of a target whose rows are whole blocks.
template <bool has_end>
struct RowPiece {
  static constexpr int kAtOnce = has_end ? 1 : kRowPiecesAtOnce;  // few tiles have an end
  char* target = nullptr;
  RowPart part;

  // The piece at that number of a span.
  __device__ __forceinline__ void load(const RowCopies::Entry& copy, const char* source_span, char* target_span, int number) {
    const int offset = number * kBlockBytes;
    target = target_span + offset;
    part.load<has_end>(source_span + offset, 0, min(kBlockBytes, copy.row_bytes - offset), copy.source_end);
  }
  __device__ __forceinline__ void store() const {
    if (target != nullptr) *reinterpret_cast<uint4*>(target) = part.value();
  }
};

// A piece of any target. Bytes [begin, end) of its block belong to the span.
template <bool has_end>
struct MixedPiece {
  static constexpr int kAtOnce = has_end ? 1 : kMixedPiecesAtOnce;
  static constexpr int kParts = 2;  // loaded at once; rows of less than a block may need more
  const RowCopies::Entry* copy = nullptr;
  char* target = nullptr;
  const char* source = nullptr;  // where the first row would have the block's first byte
  int begin = 0, end = 0, left_of_row = 0;
  RowPart parts[kParts];

  // Row `row` of the piece begins after `first` of the block's bytes.
  __device__ __forceinline__ int first_of(int row) const {
    return row == 0 ? begin : left_of_row + (row - 1) * copy->written_bytes;
  }
  __device__ __forceinline__ void load_part(RowPart& part, int row) const {
    const int written = copy->written_bytes, first = first_of(row), past_row = left_of_row + (row - 1) * written;
    part.load<has_end>(source + row * (copy->source_strides[2] - written), first, min(end, past_row + copy->row_bytes),
                       copy->source_end);
  }
  __device__ __forceinline__ void load(const RowCopies::Entry& entry, const char* source_span, char* target_span, int number) {
    copy = &entry;
    const int offset = number * kBlockBytes - (static_cast<int>(reinterpret_cast<uintptr_t>(target_span)) & (kBlockBytes - 1));
    target = target_span + offset;
    begin = max(0, -offset);
    end = min(kBlockBytes, entry.span_bytes - offset);
    const auto row = static_cast<int>(entry.row.divide(static_cast<uint32_t>(max(0, offset))));
    const int in_row = offset - row * entry.written_bytes;
    source = source_span + row * entry.source_strides[2] + in_row;
    left_of_row = entry.written_bytes - in_row;
#pragma unroll
    for (int i = 0; i < kParts; ++i) load_part(parts[i], i);
  }
  __device__ __forceinline__ void store() const {
    if (end <= begin) return;
    uint4 result = parts[0].value();
    const auto add = [&](const uint4& value) {
      result.x |= value.x, result.y |= value.y, result.z |= value.z, result.w |= value.w;
    };
    if (parts[1].low < parts[1].high) add(parts[1].value());
#pragma unroll 1
    for (int row = kParts; first_of(row) < end; ++row) {
      RowPart part;
      load_part(part, row);
      add(part.value());
    }
    if (begin == 0 && end == kBlockBytes) {
      *reinterpret_cast<uint4*>(target) = result;
      return;
    }
    const uint32_t words[4] = {result.x, result.y, result.z, result.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (begin <= 2 * i && 2 * i + 2 <= end) {
        reinterpret_cast<uint16_t*>(target)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      }
    }
  }
};

template <typename Piece>
__device__ __forceinline__ void copy_pieces(const RowCopies::Entry& copy, const char* source, char* target, uint32_t steps) {
  const auto per_step = copy.pieces_per_step.value<uint32_t>(), per_span = copy.pieces_per_span.value<uint32_t>();
  const uint32_t pieces = steps * per_step;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < pieces; first += kCopyThreads * Piece::kAtOnce) {
    Piece at[Piece::kAtOnce];
#pragma unroll
    for (int k = 0; k < Piece::kAtOnce; ++k) {
      const uint32_t i = first + k * kCopyThreads;
      if (i >= pieces) continue;
      const uint32_t step = copy.pieces_per_step.divide(i), in_step = i - step * per_step,
                     span = copy.pieces_per_span.divide(in_step), in_span = in_step - span * per_span,
                     row = span * copy.rows_per_span;
      at[k].load(copy, source + step * copy.source_strides[1] + row * copy.source_strides[2],
                 target + step * copy.target_strides[1] + row * copy.target_strides[2], static_cast<int>(in_span));
    }
#pragma unroll
    for (int k = 0; k < Piece::kAtOnce; ++k) at[k].store();
  }
}

template <bool has_end>
__device__ __forceinline__ void copy_tile(const RowCopies::Entry& copy, const char* source, char* target, uint32_t steps) {
  if (copy.has_blocks) {
    copy_pieces<RowPiece<has_end>>(copy, source, target, steps);
  } else {
    copy_pieces<MixedPiece<has_end>>(copy, source, target, steps);
  }
}

// Three blocks are resident.
__global__ void __launch_bounds__(kCopyThreads, 3) row_copies_kernel(const __grid_constant__ RowCopies p) {
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    int number = 0;
    while (number + 1 < p.count && tile >= p.entries[number + 1].first_tile) ++number;
    const RowCopies::Entry& copy = p.entries[number];
    const int64_t tile_of_copy = tile - copy.first_tile, batch = tile_of_copy / copy.tiles_per_batch,
                  first_step = (tile_of_copy - batch * copy.tiles_per_batch) * copy.steps_per_tile;
    const auto steps = static_cast<uint32_t>(min(int64_t(copy.steps_per_tile), copy.sizes[1] - first_step));
    const char* const source = copy.source + batch * copy.source_strides[0] + first_step * copy.source_strides[1];
    char* const target = copy.target + batch * copy.target_strides[0] + first_step * copy.target_strides[1];
    if (copy.end_of_rows(source, steps) + kBlockBytes > copy.source_end) {
      copy_tile<true>(copy, source, target, steps);
    } else {
      copy_tile<false>(copy, source, target, steps);
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
