// Sums of SSD backward's bwd_chunks kernel beside its matrix products: over elementwise products of two tiles.
#pragma once

#include "ssd/cuda/bwd_step_gradients.cuh"

namespace ssm_kernels::ssd {

// The lane's elements on the diagonals of two blocks (8 x 8): the upper half of the first product (16 x 8) and the lower half
// of the second. Zero in lanes that have none.
__device__ __forceinline__ float2 diagonal(const float (&products)[2][4], const FragmentLane& lane) {
  const bool is_odd = lane.quad % 2 != 0, is_there = lane.pair == lane.quad / 2;
  return {is_there ? is_odd ? products[0][1] : products[0][0] : 0.0f,
          is_there ? is_odd ? products[1][3] : products[1][2] : 0.0f};
}

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
  const auto first_operand = Sm80Mma::describe(first, lane), second_operand = Sm80Mma::describe(second, lane);
  constexpr int kGroupsOfPanel = 4;
  float products[2][2][4] = {};
#pragma unroll
  for (int panel = 0; panel < columns / 16; panel += kGroupsOfPanel) {
#pragma unroll
    for (int row = 0; row < kChunk / 16; ++row) {
      uint32_t a[kGroupsOfPanel][4], b[kGroupsOfPanel][4];
#pragma unroll
      for (int k = 0; k < kGroupsOfPanel; ++k) {
        cuda::load_group<false, false>(a[k], columns_of(rows_of(first_operand, row), panel + k));
        cuda::load_group<true, false>(b[k], columns_of(rows_of(second_operand, row), panel + k));
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

// Writes the column sums of the elementwise product of two tiles, by one warp, for the first `columns`, an even number.
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
  const auto first_operand = Sm80Mma::describe(first, lane), second_operand = Sm80Mma::describe(second, lane);
  target += lane.quad;
  const int left = lane.pair == lane.quad / 2 ? columns - lane.quad : 0;
#pragma unroll
  for (int group = 0; group < kStateRows / 16; ++group) {
    uint32_t a[kStepGroups][4], b[kStepGroups][4];
#pragma unroll
    for (int k = 0; k < kStepGroups; ++k) {
      cuda::load_group<true, true>(a[k], columns_of(rows_of(first_operand, k), group));
      cuda::load_group<false, true>(b[k], columns_of(rows_of(second_operand, k), group));
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
