// Matrix tiles in shared memory with the 128-byte swizzle, and the copies that fill them.
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

// Stands in for a member or base that a struct has only with some template arguments.
struct Empty {};

// Alignment in bytes of wgmma operands in shared memory (cuda/ptx/wgmma_sm90.cuh).
constexpr int kOperandAlignment = 1024;
template <typename Shared>
__device__ __forceinline__ Shared& align_shared(unsigned char* memory) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<Shared*>(memory + (kOperandAlignment - address % kOperandAlignment) % kOperandAlignment);
}

// kTileRows rows of 16-bit or fp32 elements in shared memory, in panels of 64 or 32 columns. A panel's rows have 128 bytes;
// their vectors (16 bytes) are swizzled by the row's number, so that operand loads hit different banks (cuda/warp_mma.cuh). The
// 16-bit layout is the one that cuda/ptx/wgmma_sm90.cuh describes.
template <int columns, int element_bytes = 2>
struct alignas(128) SmemTile {
  static constexpr int kVectorElements = static_cast<int>(sizeof(uint4)) / element_bytes, kPanelVectors = 8;
  static constexpr int kVectors = columns / kVectorElements, kPanels = kVectors / kPanelVectors;
  static_assert(kVectors % kPanelVectors == 0, "a tile consists of whole panels");
  uint4 panels[kPanels][kTileRows][kPanelVectors];
  static constexpr int kRowBytes = sizeof(uint4) * kPanelVectors, kPanelBytes = kTileRows * kRowBytes;  // in a panel

  __device__ __forceinline__ uint4* vector(int row, int column_vector) {
    return &panels[column_vector / kPanelVectors][row][column_vector % kPanelVectors ^ swizzle<element_bytes>(row)];
  }

  // One element of an fp32 tile.
  __device__ __forceinline__ float& element(int row, int column) {
    static_assert(element_bytes == sizeof(float), "only fp32 tiles have access by element");
    return reinterpret_cast<float*>(vector(row, column / kVectorElements))[column % kVectorElements];
  }

  // The address that a lane passes to ldmatrix or stmatrix for 16-bit elements: 16 rows from `row`, 16 columns from
  // column_vector on. The four matrices run along the columns first. `row` is a multiple of 8, so that it does not change the
  // swizzle.
  __device__ __forceinline__ uint4* ldmatrix_row(int row, int column_vector, int lane) {
    return vector(lane / 16 * 8 + lane % 8, column_vector + lane / 8 % 2) + row * kPanelVectors;
  }
};

// A tile as a wgmma operand (cuda/ptx/wgmma_sm90.cuh). columns_of and rows_of advance an operand by `group` groups of 16
// columns or rows.
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

// Orders in which a chunk's steps, in blocks of kBlockSteps, fill the rows of a tile. block_at(position) is the block at a
// position; position_of(block) is its inverse.
constexpr int kBlockSteps = 8;
struct InOrder {
  static SSM_HOST_DEVICE constexpr int block_at(int position) { return position; }
  static SSM_HOST_DEVICE constexpr int position_of(int block) { return block; }
};
// The first, the last, the second, the last but one ... In a matrix of pairs of steps each warp's 16 rows then have equally
// many elements on one side of the diagonal.
struct FromBothEnds {
  static constexpr int kLast = kTileRows / kBlockSteps - 1;
  static SSM_HOST_DEVICE constexpr int block_at(int position) {
    return position % 2 == 0 ? position / 2 : kLast - position / 2;
  }
  static SSM_HOST_DEVICE constexpr int position_of(int block) {
    return 2 * block <= kLast ? 2 * block : 2 * (kLast - block) + 1;
  }
};

// A thread's share of copying a tensor's rows, chunk by chunk, to tiles of `columns` columns: one vector of every kRows-th row.
template <typename Scalar, int columns, int threads, typename Order = InOrder>
class RowCopier {
 public:
  using TargetTile = SmemTile<columns, sizeof(Scalar)>;

  // The first chunk begins at `source`; its rows have `elements` elements. A tile's other columns become zeros.
  __device__ __forceinline__ RowCopier(const Scalar* source, int64_t stride_step, int elements, int thread)
      : column_(thread % kVectors),
        row_(thread / kVectors),
        is_there_(column_ * kVectorElements < elements),
        source_(source + column_ * kVectorElements + row_ * stride_step) {}

  // Starts the copies of a chunk and advances to the next chunk, or the previous one. Rows from `first` to steps - 1 are
  // copied; the others become zeros.
  __device__ __forceinline__ void copy(TargetTile& tile, int steps, int64_t stride_step, bool is_reverse = false,
                                       int first = 0) {
    const Scalar* source = source_;
    if (steps == kTileRows && first == 0) {
      const int bytes = is_there_ ? kCpAsyncBytes : 0;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        cp_async(tile.vector(row_ + tile_row(i * kRows), column_), source, bytes);
        source += kRows * stride_step;
      }
    } else {
#pragma unroll 1
      for (int row = row_; row < kTileRows; row += kRows) {
        cp_async(tile.vector(tile_row(row), column_), source, is_there_ && row >= first && row < steps ? kCpAsyncBytes : 0);
        source += kRows * stride_step;
      }
    }
    source_ += is_reverse ? -kTileRows * stride_step : kTileRows * stride_step;
  }

 private:
  static constexpr int kVectorElements = TargetTile::kVectorElements, kVectors = TargetTile::kVectors;
  static constexpr int kRows = threads / kVectors, kCopies = kTileRows / kRows;
  static_assert(threads % kVectors == 0 && kTileRows % kRows == 0, "a thread copies one column of vectors");
  static_assert(std::is_same_v<Order, InOrder> || kBlockSteps % kRows == 0,
                "rows that are copied together are in one block of steps");

  static __device__ __forceinline__ constexpr int tile_row(int row) {
    return Order::position_of(row / kBlockSteps) * kBlockSteps + row % kBlockSteps;
  }

  int column_, row_;
  bool is_there_;
  const Scalar* source_;
};

}  // namespace ssm_kernels::cuda
