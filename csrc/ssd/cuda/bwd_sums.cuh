// What the products of SSD backward's chunks need beside them: sums over a fragment's rows and columns, and products of whole
// tiles element by element.
#pragma once

#include "cuda/ptx/mma_sm80.cuh"
#include "ssd/cuda/bwd_step_gradients.cuh"

namespace ssm_kernels::ssd {

// Sums of four numbers over the four lanes of a row: each has the one of its `pair`.
template <typename Sum>
__device__ __forceinline__ Sum sum_over_row(const Sum (&values)[4], const FragmentLane& lane) {
  const bool is_odd = lane.pair % 2 != 0, is_upper = lane.pair >= 2;
  Sum kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Sum own = is_upper ? values[2 + i] : values[i], other = is_upper ? values[i] : values[2 + i];
    kept[i] = own + __shfl_xor_sync(kAllLanes, other, 2);
  }
  return (is_odd ? kept[1] : kept[0]) + __shfl_xor_sync(kAllLanes, is_odd ? kept[0] : kept[1], 1);
}
// Sums of so many numbers over the eight lanes of a warp with the same `pair`: of a lane for which has_column_sum, the one that
// column_sum_index names.
constexpr int kColumnLanes = 8;
template <typename Sum, int count>
__device__ __forceinline__ Sum sum_over_column(Sum (&values)[count], const FragmentLane& lane) {
#pragma unroll
  for (int kept = count / 2, distance = 16; distance >= 4; kept /= 2, distance /= 2) {
    if (kept == 0) {
      values[0] += __shfl_xor_sync(kAllLanes, values[0], distance);
      continue;
    }
    const bool is_upper = (lane.index & distance) != 0;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const Sum own = is_upper ? values[k + kept] : values[k];
      values[k] = own + __shfl_xor_sync(kAllLanes, is_upper ? values[k] : values[k + kept], distance);
    }
  }
  return values[0];
}
template <int count>
__device__ __forceinline__ bool has_column_sum(const FragmentLane& lane) {
  return lane.quad % (kColumnLanes / count) == 0;
}
template <int count>
__device__ __forceinline__ int column_sum_index(const FragmentLane& lane) {
  static_assert(count == 4 || count == 8, "powers of two, to as many lanes or half of them");
  return lane.quad / (kColumnLanes / count);
}
// The sums of the elements on the diagonals of the blocks (16 x 8) that follow one another in two products of a warp: those of
// the first have the upper eight rows, those of the second the lower. Zero in lanes that have none.
__device__ __forceinline__ float2 diagonal(const float (&products)[2][4], const FragmentLane& lane) {
  const bool is_odd = lane.quad % 2 != 0, is_there = lane.pair == lane.quad / 2;
  return {is_there ? is_odd ? products[0][1] : products[0][0] : 0.0f,
          is_there ? is_odd ? products[1][3] : products[1][2] : 0.0f};
}

// Where a lane's row of four 8 x 8 matrices lies, as for ldmatrix, in 16 rows and 16 columns of a tile.
class MatricesOfTile {
 public:
  // The four run along the columns first, or down the rows.
  __device__ __forceinline__ MatricesOfTile(bool ldmatrix_row, const FragmentLane& lane) {
    const int row = ldmatrix_row ? lane.index / 16 * 8 + lane.index % 8 : lane.index % 16;
    const int piece = ldmatrix_row ? lane.index / 8 % 2 : lane.index / 16;
    offset_ = row * SmemTile<kChunk>::kRowBytes + (piece ^ row % 8) * int(sizeof(uint4));
  }

  template <int columns>
  __device__ __forceinline__ const void* at(SmemTile<columns>& tile, int row_group, int column_group) const {
    const int place = (offset_ ^ (column_group % 4 * 2 * int(sizeof(uint4)))) +
                      column_group / 4 * (kChunk * SmemTile<kChunk>::kRowBytes) + row_group * 16 * SmemTile<kChunk>::kRowBytes;
    return reinterpret_cast<const unsigned char*>(&tile) + place;
  }

 private:
  int offset_;
};

// The sum over all elements of a product of two tiles, element by element, by one warp.
template <typename Scalar, int columns>
__device__ __forceinline__ float inner_product(const SmemTile<columns, 4>& first, const SmemTile<columns, 4>& second,
                                               const FragmentLane& lane) {
  constexpr int kVectors = sizeof(first) / sizeof(float4);
  const auto *of_first = reinterpret_cast<const float4*>(&first), *of_second = reinterpret_cast<const float4*>(&second);
  float4 sums = {0, 0, 0, 0};
#pragma unroll 8
  for (int i = lane.index; i < kVectors; i += kWarpSize) {
    const float4 a = of_first[i], b = of_second[i];
    sums = {fmaf(a.x, b.x, sums.x), fmaf(a.y, b.y, sums.y), fmaf(a.z, b.z, sums.z), fmaf(a.w, b.w, sums.w)};
  }
  return sum_over_warp((sums.x + sums.y) + (sums.z + sums.w));
}
template <typename Scalar, int columns>
__device__ __forceinline__ float inner_product(SmemTile<columns>& first, SmemTile<columns>& second, const FragmentLane& lane) {
  const MatricesOfTile of_first(false, lane), of_second(true, lane);
  constexpr int kGroupsOfPanel = 4;
  float products[2][2][4] = {};
#pragma unroll
  for (int panel = 0; panel < columns / 16; panel += kGroupsOfPanel) {
#pragma unroll
    for (int row = 0; row < kChunk / 16; ++row) {
      uint32_t a[kGroupsOfPanel][4], b[kGroupsOfPanel][4];
#pragma unroll
      for (int k = 0; k < kGroupsOfPanel; ++k) {
        cuda::ldmatrix(a[k], of_first.at(first, row, panel + k));
        cuda::ldmatrix(b[k], of_second.at(second, row, panel + k));
      }
#pragma unroll
      for (int k = 0; k < kGroupsOfPanel; ++k) {
        cuda::mma<Scalar>(products[k % 2][0], a[k], b[k][0], b[k][1]);
        cuda::mma<Scalar>(products[k % 2][1], a[k], b[k][2], b[k][3]);
      }
    }
  }
  const float2 even = diagonal(products[0], lane), odd = diagonal(products[1], lane);
  return sum_over_warp((even.x + even.y) + (odd.x + odd.y));
}

// The sums over each column of a product of two tiles, element by element, by one warp: of the first `columns`, an even number.
template <typename Scalar>
__device__ __forceinline__ void write_column_products(SmemTile<kStateRows, 4>& first, SmemTile<kStateRows, 4>& second,
                                                      float* target, int columns, const FragmentLane& lane) {
  const int column = 2 * lane.index;
  float2 sum = {0, 0};
#pragma unroll 8
  for (int step = 0; step < kChunk; ++step) {
    const auto a = *reinterpret_cast<const float2*>(&first.element(step, column)),
               b = *reinterpret_cast<const float2*>(&second.element(step, column));
    sum = {fmaf(a.x, b.x, sum.x), fmaf(a.y, b.y, sum.y)};
  }
  if (column < columns) *reinterpret_cast<float2*>(target + column) = sum;
}
template <typename Scalar>
__device__ __forceinline__ void write_column_products(SmemTile<kStateRows>& first, SmemTile<kStateRows>& second, float* target,
                                                      int columns, const FragmentLane& lane) {
  const MatricesOfTile of_first(true, lane), of_second(false, lane);
  target += lane.quad;
  const int left = lane.pair == lane.quad / 2 ? columns - lane.quad : 0;
#pragma unroll
  for (int group = 0; group < kStateRows / 16; ++group) {
    uint32_t a[kStepGroups][4], b[kStepGroups][4];
#pragma unroll
    for (int k = 0; k < kStepGroups; ++k) {
      cuda::ldmatrix_transposed(a[k], of_first.at(first, k, group));
      cuda::ldmatrix_transposed(b[k], of_second.at(second, k, group));
    }
    float products[2][4] = {};
#pragma unroll
    for (int k = 0; k < kStepGroups; ++k) {
      cuda::mma<Scalar>(products[0], a[k], b[k][0], b[k][1]);
      cuda::mma<Scalar>(products[1], a[k], b[k][2], b[k][3]);
    }
    const float2 sums = diagonal(products, lane);
    if (16 * group < left) target[16 * group] = sums.x;
    if (16 * group + 8 < left) target[16 * group + 8] = sums.y;
  }
}

}  // namespace ssm_kernels::ssd
