// The gradients of rows of q or k with qk_l2norm, for rows of which no block of backward has all columns. Of a row x with the
// factor r, the sums that backward writes are d, r times the gradient of the normalized row, and the result is d - r x (r x .
// d). A warp takes a row, of which a lane has eight columns.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/vector_io.cuh"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

constexpr int kRowGradThreads = 256;

template <typename Scalar>
__global__ void __launch_bounds__(kRowGradThreads)
    delta_rule_row_grads_kernel(const __grid_constant__ DeltaRuleRowGradsParams p) {
  using Vector = cuda::Vector<Scalar, kRowElements>;
  using Sums = cuda::Vector<float, kRowElements>;
  static_assert(kMaxKernelDstate <= cuda::kWarpSize * kRowElements, "a lane has one vector");
  const int64_t place = int64_t(blockIdx.x) * (kRowGradThreads / cuda::kWarpSize) + threadIdx.x / cuda::kWarpSize;
  if (place >= p.batch * p.seqlen * p.heads) return;
  const int column = static_cast<int>(threadIdx.x % cuda::kWarpSize) * kRowElements;
  const int64_t head = place % p.heads, step = place / p.heads % p.seqlen, batch = place / p.heads / p.seqlen;
  const auto at = [&](const RowsView& view, auto* data, int64_t first) {
    return data + batch * view.stride_batch + step * view.stride_step + head * view.stride_head + first;
  };
  const float factor = *at(p.row_factors, static_cast<const float*>(p.row_factors.data), p.are_queries ? 1 : 0);
  Vector row = {};
  Sums sums = {};
  if (column < p.key_dim) {
    row = *reinterpret_cast<const Vector*>(at(p.rows, static_cast<const Scalar*>(p.rows.data), column));
    sums = *reinterpret_cast<const Sums*>(at(p.sums, static_cast<const float*>(p.sums.data), column));
  }
  float unit[kRowElements], along = 0;
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    if (column + i >= p.key_dim) sums.set(i, 0.0f);
    unit[i] = factor * row.accumulate(i);
    along = fmaf(unit[i], sums.accumulate(i), along);
  }
  along = cuda::sum_over_warp(along);
  if (column >= p.key_dim) return;
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) unit[i] = fmaf(-along, unit[i], sums.accumulate(i));
  *reinterpret_cast<Vector*>(at(p.grad, static_cast<Scalar*>(p.grad.data), column)) = Vector::round(unit);
}

}  // namespace ssm_kernels::delta_rule
