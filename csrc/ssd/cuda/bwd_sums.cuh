// Sums of SSD backward's bwd_chunks kernel beside its matrix products: over a fragment's rows and columns, and over elementwise
// products of two tiles.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/ptx/mma_sm80.cuh"
#include "ssd/cuda/bwd_step_gradients.cuh"

namespace ssm_kernels::ssd {

// Sums each of four values over the four lanes of a row. A lane receives the sum of the value with the index `pair`.
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
// Sums each of `count` values over the eight lanes of a warp with the same `pair`. A lane with has_column_sum() receives the
// sum of the value with the index column_sum_index().
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
  static_assert(count == 4 || count == 8, "every lane receives a sum, or every second one");
  return lane.quad / (kColumnLanes / count);
}
// The lane's elements on the diagonals of two blocks (8 x 8): the upper half of the first product (16 x 8) and the lower half
// of the second. Zero in lanes that have none.
__device__ __forceinline__ float2 diagonal(const float (&products)[2][4], const FragmentLane& lane) {
  const bool is_odd = lane.quad % 2 != 0, is_there = lane.pair == lane.quad / 2;
  return {is_there ? is_odd ? products[0][1] : products[0][0] : 0.0f,
          is_there ? is_odd ? products[1][3] : products[1][2] : 0.0f};
}

// The address that a lane passes to ldmatrix: a row of one of four 8 x 8 matrices, in 16 rows and 16 columns of a tile.
class LdmatrixRows {
 public:
  // The four matrices run along the columns first, or down the rows first.
  __device__ __forceinline__ LdmatrixRows(bool columns_first, const FragmentLane& lane) {
    const int row = columns_first ? lane.index / 16 * 8 + lane.index % 8 : lane.index % 16;
    const int vector = columns_first ? lane.index / 8 % 2 : lane.index / 16;
    offset_ = row * SmemTile<kChunk>::kRowBytes + (vector ^ row % 8) * int(sizeof(uint4));
  }

  template <int columns>
  __device__ __forceinline__ const void* at(SmemTile<columns>& tile, int row_group, int column_group) const {
    const int offset = (offset_ ^ (column_group % 4 * 2 * int(sizeof(uint4)))) +
                       column_group / 4 * (kChunk * SmemTile<kChunk>::kRowBytes) + row_group * 16 * SmemTile<kChunk>::kRowBytes;
    return reinterpret_cast<const unsigned char*>(&tile) + offset;
  }

 private:
  int offset_;
};

// The sum over the elementwise product of two tiles, by one warp. For fp16 and bf16 it is the trace of a matrix product.
template <typename Scalar, int columns>
__device__ __forceinline__ float inner_product(const SmemTile<columns, 4>& first, const SmemTile<columns, 4>& second,
                                               const FragmentLane& lane) {
  constexpr int kVectors = sizeof(first) / sizeof(float4);
  const auto *first_vectors = reinterpret_cast<const float4*>(&first),
             *second_vectors = reinterpret_cast<const float4*>(&second);
  float4 sums = {0, 0, 0, 0};
#pragma unroll 8
  for (int i = lane.index; i < kVectors; i += kWarpSize) {
    const float4 a = first_vectors[i], b = second_vectors[i];
    sums = {fmaf(a.x, b.x, sums.x), fmaf(a.y, b.y, sums.y), fmaf(a.z, b.z, sums.z), fmaf(a.w, b.w, sums.w)};
  }
  return cuda::sum_over_warp((sums.x + sums.y) + (sums.z + sums.w));
}
template <typename Scalar, int columns>
__device__ __forceinline__ float inner_product(SmemTile<columns>& first, SmemTile<columns>& second, const FragmentLane& lane) {
  const LdmatrixRows first_rows(false, lane), second_rows(true, lane);
  constexpr int kGroupsOfPanel = 4;
  float products[2][2][4] = {};
#pragma unroll
  for (int panel = 0; panel < columns / 16; panel += kGroupsOfPanel) {
#pragma unroll
    for (int row = 0; row < kChunk / 16; ++row) {
      uint32_t a[kGroupsOfPanel][4], b[kGroupsOfPanel][4];
#pragma unroll
      for (int k = 0; k < kGroupsOfPanel; ++k) {
        cuda::ldmatrix(a[k], first_rows.at(first, row, panel + k));
        cuda::ldmatrix(b[k], second_rows.at(second, row, panel + k));
      }
#pragma unroll
      for (int k = 0; k < kGroupsOfPanel; ++k) {
        cuda::mma<Scalar>(products[k % 2][0], a[k], b[k][0], b[k][1]);
        cuda::mma<Scalar>(products[k % 2][1], a[k], b[k][2], b[k][3]);
      }
    }
  }
  const float2 even = diagonal(products[0], lane), odd = diagonal(products[1], lane);
  return cuda::sum_over_warp((even.x + even.y) + (odd.x + odd.y));
}

// Writes the column sums of the elementwise product of two tiles, by one warp, for the first `columns`, in fp32 rounded up
// to an even number.
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
  const LdmatrixRows first_rows(true, lane), second_rows(false, lane);
  target += lane.quad;
  const int left = lane.pair == lane.quad / 2 ? columns - lane.quad : 0;
#pragma unroll
  for (int group = 0; group < kStateRows / 16; ++group) {
    uint32_t a[kStepGroups][4], b[kStepGroups][4];
#pragma unroll
    for (int k = 0; k < kStepGroups; ++k) {
      cuda::ldmatrix_transposed(a[k], first_rows.at(first, k, group));
      cuda::ldmatrix_transposed(b[k], second_rows.at(second, k, group));
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
