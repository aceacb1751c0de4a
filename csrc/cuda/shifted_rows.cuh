// Copies of rows that start at any element to swizzled tiles (cuda/smem_tile.cuh), for rows that RowCopier cannot copy:
// cp.async moves 16 bytes between multiples of 16 bytes only. The tile gets the same contents as from an aligned copy of the
// rows.
//
// 2-byte elements: a row begins `past` bytes after a multiple of 16 bytes. start() copies the aligned blocks of memory that
// hold the row to the row's vectors. Once they have arrived, finish() moves the elements `past` bytes to the front, in place: a
// lane has a row, and reads vectors before it writes those in front of them. The last vector of a full row also needs the first
// bytes of one more block, which last_block() loads. Lanes with neighboring rows read vectors in different banks because of the
// swizzle.
//
// fp32: start() copies single elements, and there is nothing to finish.
//
// Sizes are run-time values and loops are rolled, so that a kernel has this code once for all of its tiles.
#pragma once

#include "cuda/shifted_io.cuh"
#include "cuda/smem_tile.cuh"

namespace ssm_kernels::cuda {

// The 16 bytes that begin `past` bytes after the first of two neighboring blocks. `past` is even and less than 16.
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

// A warp's share of a chunk's rows: consecutive ones.
template <int element_bytes>
struct ShiftedRows {
  unsigned char* tile;             // a SmemTile
  int vectors;                     // of a row of the tile
  const unsigned char* source;     // of the chunk's first row
  int64_t stride;                  // bytes from row to row
  int bytes;                       // of a row from `source` on; the rest of the tile's row becomes zeros
  int first_row, rows;             // of the warp
  int first, steps;                // rows from `first` to steps - 1 are copied; the others become zeros
  bool is_from_both_ends = false;  // the order of the rows in the tile, FromBothEnds or InOrder

  // Of source elements, for one of `warps` warps.
  template <typename Scalar, int columns>
  static __device__ __forceinline__ ShiftedRows make(SmemTile<columns, element_bytes>& tile, const Scalar* source,
                                                     int64_t stride_step, int elements, int steps, int warp, int warps,
                                                     int first = 0, bool is_from_both_ends = false) {
    static_assert(sizeof(Scalar) == element_bytes, "the tile has the tensor's type");
    return {reinterpret_cast<unsigned char*>(&tile),
            SmemTile<columns, element_bytes>::kVectors,
            reinterpret_cast<const unsigned char*>(source),
            stride_step * element_bytes,
            elements * element_bytes,
            warp * (kTileRows / warps),
            kTileRows / warps,
            first,
            steps,
            is_from_both_ends};
  }

  __device__ __forceinline__ void start() const {
    const int lane = threadIdx.x % kWarpSize;
    if constexpr (element_bytes == 4) {
#pragma unroll 1
      for (int i = first_row; i < first_row + rows; ++i) {
        const unsigned char* const from = row(i);
        const bool is_there = has(i);
#pragma unroll 1
        for (int byte = 4 * lane; byte < vectors * kCpAsyncBytes; byte += 4 * kWarpSize) {
          cp_async_word(vector(i, byte / kCpAsyncBytes) + byte % kCpAsyncBytes, from + byte, is_there && byte < bytes);
        }
      }
    } else {
      const int log2_vectors = vectors == 8 ? 3 : 4, column = lane & (vectors - 1);
#pragma unroll 2
      for (int i = first_row + (lane >> log2_vectors); i < first_row + rows; i += kWarpSize >> log2_vectors) {
        const unsigned char* const from = row(i);
        const int past = bytes_past_multiple<kCpAsyncBytes>(from);
        cp_async(vector(i, column), from - past + column * kCpAsyncBytes, valid_bytes(i, past, column));
      }
    }
  }

  // The block that follows the last vector of the lane's row, the round-th one. Reads nothing beyond the row.
  __device__ __forceinline__ uint4 last_block(int round) const {
    const int i = row_of_lane(round);
    const unsigned char* const from = row(i);
    const int past = bytes_past_multiple<kCpAsyncBytes>(from), valid = past != 0 ? valid_bytes(i, past, vectors) : 0;
    const unsigned char* const block = from - past + vectors * kCpAsyncBytes;
    uint32_t words[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (4 * k + 4 <= valid) {
        words[k] = __ldcg(reinterpret_cast<const unsigned int*>(block) + k);
      } else if (4 * k + 2 <= valid) {
        words[k] = __ldcg(reinterpret_cast<const unsigned short*>(block) + 2 * k);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // The warp's copies have arrived, and its lanes have waited for one another since.
  __device__ __forceinline__ void finish(int round, const uint4& last) const {
    static_assert(element_bytes == 2, "fp32 has nothing to finish");
    const int i = row_of_lane(round), past = bytes_past_multiple<kCpAsyncBytes>(row(i));
    if (past == 0 || !has(i)) return;
    constexpr int kAtOnce = 2;
    uint4 blocks[kAtOnce + 1];
    blocks[kAtOnce] = load(i, 0);
#pragma unroll 1
    for (int at = 0; at < vectors; at += kAtOnce) {
      blocks[0] = blocks[kAtOnce];
#pragma unroll
      for (int k = 1; k < kAtOnce; ++k) blocks[k] = load(i, at + k);
      blocks[kAtOnce] = at + kAtOnce < vectors ? load(i, at + kAtOnce) : last;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        *reinterpret_cast<uint4*>(vector(i, at + k)) = shift_blocks(blocks[k], blocks[k + 1], past);
      }
    }
  }

 private:
  __device__ __forceinline__ const unsigned char* row(int i) const { return source + i * stride; }
  __device__ __forceinline__ unsigned char* vector(int i, int column) const {
    const int in_tile =
        (is_from_both_ends ? FromBothEnds::position_of(i / kBlockSteps) : i / kBlockSteps) * kBlockSteps + i % kBlockSteps;
    return tile + column / 8 * SmemTile<64>::kPanelBytes + in_tile * SmemTile<64>::kRowBytes +
           (column % 8 ^ swizzle<element_bytes>(in_tile)) * kCpAsyncBytes;
  }
  __device__ __forceinline__ uint4 load(int i, int column) const { return *reinterpret_cast<const uint4*>(vector(i, column)); }
  // The lane's row, or one that has() not.
  __device__ __forceinline__ int row_of_lane(int round) const {
    const int i = round * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
    return i < rows ? first_row + i : kTileRows;
  }
  __device__ __forceinline__ bool has(int i) const { return i >= first && i < steps; }
  // The bytes of a row's elements that are in one of its blocks, or before it in the first.
  __device__ __forceinline__ int valid_bytes(int i, int past, int block) const {
    return has(i) && bytes > 0 ? max(0, min(past + bytes - block * kCpAsyncBytes, kCpAsyncBytes)) : 0;
  }
};

// Starts the copies of several tiles: rows_of(number) are the warp's rows of one.
template <typename RowsOf>
__device__ __forceinline__ void start_shifted_rows(int tiles, const RowsOf& rows_of) {
#pragma unroll 1
  for (int number = 0; number < tiles; ++number) rows_of(number).start();
}

// Finishes them, when this thread's copies have arrived. The next last block is loaded while a row is shifted. Each tile takes
// `rounds` rounds of a row for each lane.
template <int rounds, typename RowsOf>
__device__ __forceinline__ void finish_shifted_rows(int tiles, const RowsOf& rows_of) {
  __syncwarp();
  uint4 last = rows_of(0).last_block(0);
#pragma unroll 1
  for (int item = 0; item < tiles * rounds; ++item) {
    uint4 next = {0, 0, 0, 0};
    if (item + 1 < tiles * rounds) next = rows_of((item + 1) / rounds).last_block((item + 1) % rounds);
    rows_of(item / rounds).finish(item % rounds, last);
    last = next;
  }
}

}  // namespace ssm_kernels::cuda
