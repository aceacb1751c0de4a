// What the products of SSD backward's chunks need beside them: sums over a fragment's rows and columns, and products of whole
// tiles element by element.
#pragma once

#include "cuda/mma.cuh"
#include "ssd/ssd_bwd_steps.cuh"

namespace ssm_kernels::ssd {

// Sums of four numbers over the four lanes of a row: each has the one of its `pair`.
__device__ __forceinline__ float sum_over_row(const float (&values)[4], const Lane& lane) {
  const bool is_odd = lane.pair % 2 != 0, is_upper = lane.pair >= 2;
  float kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float own = is_upper ? values[2 + i] : values[i], other = is_upper ? values[i] : values[2 + i];
    kept[i] = own + __shfl_xor_sync(kWholeWarp, other, 2);
  }
  return (is_odd ? kept[1] : kept[0]) + __shfl_xor_sync(kWholeWarp, is_odd ? kept[0] : kept[1], 1);
}
// Sums of so many numbers over the eight lanes of a warp with the same `pair`: of a lane for which has_column_sum, the one that
// column_sum_index names.
constexpr int kColumnLanes = 8;
template <int count>
__device__ __forceinline__ float sum_over_column(float (&values)[count], const Lane& lane) {
#pragma unroll
  for (int kept = count / 2, distance = 16; distance >= 4; kept /= 2, distance /= 2) {
    if (kept == 0) {
      values[0] += __shfl_xor_sync(kWholeWarp, values[0], distance);
      continue;
    }
    const bool is_upper = (lane.index & distance) != 0;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const float own = is_upper ? values[k + kept] : values[k];
      values[k] = own + __shfl_xor_sync(kWholeWarp, is_upper ? values[k] : values[k + kept], distance);
    }
  }
  return values[0];
}
template <int count>
__device__ __forceinline__ bool has_column_sum(const Lane& lane) {
  return lane.quad % (kColumnLanes / count) == 0;
}
template <int count>
__device__ __forceinline__ int column_sum_index(const Lane& lane) {
  static_assert(count == 4 || count == 8, "powers of two, to as many lanes or half of them");
  return lane.quad / (kColumnLanes / count);
}
// The sums of the elements on the diagonals of the blocks (16 x 8) that follow one another in two products of a warp: those of
// the first have the upper eight rows, those of the second the lower. Zero in lanes that have none.
__device__ __forceinline__ float2 diagonal(const float (&products)[2][4], const Lane& lane) {
  const bool is_odd = lane.quad % 2 != 0, is_there = lane.pair == lane.quad / 2;
  return {is_there ? is_odd ? products[0][1] : products[0][0] : 0.0f,
          is_there ? is_odd ? products[1][3] : products[1][2] : 0.0f};
}

// Where a lane's row of four 8 x 8 matrices lies, as for load_matrices, in 16 rows and 16 columns of a tile.
class MatricesOfTile {
 public:
  // The four run along the columns first, or down the rows.
  __device__ __forceinline__ MatricesOfTile(bool columns_first, const Lane& lane) {
    const int row = columns_first ? lane.index / 16 * 8 + lane.index % 8 : lane.index % 16;
    const int piece = columns_first ? lane.index / 8 % 2 : lane.index / 16;
    offset_ = row * Tile<kChunk>::kRowBytes + (piece ^ row % 8) * int(sizeof(uint4));
  }

  template <int columns>
  __device__ __forceinline__ const void* at(Tile<columns>& tile, int row_group, int column_group) const {
    const int place = (offset_ ^ (column_group % 4 * 2 * int(sizeof(uint4)))) +
                      column_group / 4 * (kChunk * Tile<kChunk>::kRowBytes) + row_group * 16 * Tile<kChunk>::kRowBytes;
    return reinterpret_cast<const unsigned char*>(&tile) + place;
  }

 private:
  int offset_;
};

// The sum over all elements of a product of two tiles, element by element, by one warp.
template <typename Scalar, int columns>
__device__ __forceinline__ float inner_product(Tile<columns>& first, Tile<columns>& second, const Lane& lane) {
  const MatricesOfTile of_first(false, lane), of_second(true, lane);
  constexpr int kGroupsOfPart = 4;
  float products[2][2][4] = {};
#pragma unroll
  for (int part = 0; part < columns / 16; part += kGroupsOfPart) {
#pragma unroll
    for (int row = 0; row < kChunk / 16; ++row) {
      uint32_t a[kGroupsOfPart][4], b[kGroupsOfPart][4];
#pragma unroll
      for (int k = 0; k < kGroupsOfPart; ++k) {
        cuda::load_matrices(a[k], of_first.at(first, row, part + k));
        cuda::load_matrices(b[k], of_second.at(second, row, part + k));
      }
#pragma unroll
      for (int k = 0; k < kGroupsOfPart; ++k) {
        cuda::mma<Scalar>(products[k % 2][0], a[k], b[k][0], b[k][1]);
        cuda::mma<Scalar>(products[k % 2][1], a[k], b[k][2], b[k][3]);
      }
    }
  }
  const float2 even = diagonal(products[0], lane), odd = diagonal(products[1], lane);
  return sum_over_warp((even.x + even.y) + (odd.x + odd.y));
}

}  // namespace ssm_kernels::ssd
