// Tiles of matrices in shared memory with the 128-byte swizzle, and the copies that fill them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/macros.h"
#include "cuda/constants.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/warp_mma.cuh"

namespace ssm_kernels::cuda {

constexpr int kTileRows = 64;  // the rows of wgmma's D

// In place of what a struct has only with some template arguments.
struct Empty {};

// What operands of cuda/ptx/wgmma_sm90.cuh in shared memory begin at multiples of.
constexpr int kOperandAlignment = 1024;
template <typename Shared>
__device__ __forceinline__ Shared& align_shared(unsigned char* memory) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<Shared*>(memory + (kOperandAlignment - address % kOperandAlignment) % kOperandAlignment);
}

// kTileRows rows in shared memory, of 16-bit elements or of fp32, in parts of 64 or 32 columns: rows of 128 bytes, whose pieces
// of 16 bytes change places by the row's number (cuda/warp_mma.cuh says why so), so that loads of operands meet different
// banks. That of 16 bits is also the layout that cuda/ptx/wgmma_sm90.cuh describes.
template <int columns, int element_bytes = 2>
struct alignas(128) SmemTile {
  static constexpr int kVectorElements = static_cast<int>(sizeof(uint4)) / element_bytes, kPanelVectors = 8;
  static constexpr int kVectors = columns / kVectorElements, kPanels = kVectors / kPanelVectors;
  static_assert(kVectors % kPanelVectors == 0, "a tile is made of whole parts");
  uint4 panels[kPanels][kTileRows][kPanelVectors];
  static constexpr int kRowBytes = sizeof(uint4) * kPanelVectors, kPanelBytes = kTileRows * kRowBytes;  // a row's of a part

  __device__ __forceinline__ uint4* vector(int row, int column_vector) {
    return &panels[column_vector / kPanelVectors][row][column_vector % kPanelVectors ^ swizzle<element_bytes>(row)];
  }

  // Of fp32.
  __device__ __forceinline__ float& element(int row, int column) {
    static_assert(element_bytes == sizeof(float), "others are not taken one by one");
    return reinterpret_cast<float*>(vector(row, column / kVectorElements))[column % kVectorElements];
  }

  // The address that a lane gives for ldmatrix, which is for 16 bits: 16 rows from `row`, 16 columns from column_piece;
  // the four matrices run along the columns first. `row` is a multiple of 8: the pieces of a column lie so many rows apart.
  __device__ __forceinline__ uint4* ldmatrix_row(int row, int column_vector, int lane) {
    return vector(lane / 16 * 8 + lane % 8, column_vector + lane / 8 % 2) + row * kPanelVectors;
  }
};

// A tile as an operand of cuda/ptx/wgmma_sm90.cuh, and from an operand on, that of the given group of 16 columns or rows.
template <int columns>
__device__ __forceinline__ uint64_t make_operand(const SmemTile<columns>& tile) {
  return make_wgmma_descriptor(&tile, SmemTile<columns>::kPanelBytes);
}
__device__ __forceinline__ uint64_t columns_of(uint64_t operand, int group) {
  constexpr int kGroupsOfPanel = 4, kColumnBytes = 32;
  return operand + (group / kGroupsOfPanel * SmemTile<kTileRows>::kPanelBytes + group % kGroupsOfPanel * kColumnBytes) / 16;
}
__device__ __forceinline__ uint64_t rows_of(uint64_t operand, int group) {
  return operand + group * 16 * SmemTile<kTileRows>::kRowBytes / 16;
}

// Orders in which a chunk's steps, eight by eight, lie down the rows of a tile: which eight are at a place, and the reverse.
constexpr int kBlockSteps = 8;
struct InOrder {
  static SSM_HOST_DEVICE constexpr int block_at(int place) { return place; }
  static SSM_HOST_DEVICE constexpr int place_of(int block) { return block; }
};
// The first, the last, the second, the last but one ... Of a matrix of pairs of steps each warp's 16 rows have then equally
// much on one side of the diagonal.
struct FromBothEnds {
  static constexpr int kLast = kTileRows / kBlockSteps - 1;
  static SSM_HOST_DEVICE constexpr int block_at(int place) { return place % 2 == 0 ? place / 2 : kLast - place / 2; }
  static SSM_HOST_DEVICE constexpr int place_of(int block) { return 2 * block <= kLast ? 2 * block : 2 * (kLast - block) + 1; }
};

// A thread's share of copying a tensor's rows, chunk by chunk, to tiles of that many columns: of every kRows-th row one piece.
template <typename Scalar, int columns, int threads, typename Order = InOrder>
class RowCopier {
 public:
  using TargetTile = SmemTile<columns, sizeof(Scalar)>;

  // From a chunk at `source`, rows of that many elements; a tile's other columns become zeros.
  __device__ __forceinline__ RowCopier(const Scalar* source, int64_t stride_step, int elements, int thread)
      : column_(thread % kVectors),
        row_(thread / kVectors),
        is_there_(column_ * kVectorElements < elements),
        source_(source + column_ * kVectorElements + row_ * stride_step) {}

  // Starts the copies of a chunk, of which only the first `steps` rows exist, or those from `first` on; the others become
  // zeros. Then goes on to the next, or the one before.
  __device__ __forceinline__ void copy(TargetTile& tile, int steps, int64_t stride_step, bool is_reverse = false,
                                       int first = 0) {
    const Scalar* source = source_;
    if (steps == kTileRows && first == 0) {
      const int bytes = is_there_ ? kCpAsyncBytes : 0;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        cp_async(tile.vector(row_ + place_of(i * kRows), column_), source, bytes);
        source += kRows * stride_step;
      }
    } else {
#pragma unroll 1
      for (int row = row_; row < kTileRows; row += kRows) {
        cp_async(tile.vector(place_of(row), column_), source, is_there_ && row >= first && row < steps ? kCpAsyncBytes : 0);
        source += kRows * stride_step;
      }
    }
    source_ += is_reverse ? -kTileRows * stride_step : kTileRows * stride_step;
  }

 private:
  static constexpr int kVectorElements = TargetTile::kVectorElements, kVectors = TargetTile::kVectors;
  static constexpr int kRows = threads / kVectors, kCopies = kTileRows / kRows;
  static_assert(threads % kVectors == 0 && kTileRows % kRows == 0, "a thread copies one column of pieces");
  static_assert(std::is_same_v<Order, InOrder> || kBlockSteps % kRows == 0, "rows of one copy lie together in any order");

  static __device__ __forceinline__ constexpr int place_of(int row) {
    return Order::place_of(row / kBlockSteps) * kBlockSteps + row % kBlockSteps;
  }

  int column_, row_;
  bool is_there_;
  const Scalar* source_;
};

}  // namespace ssm_kernels::cuda
