// Forward of add_rms_norm with a float32 residual and without bias.
//
//   v = x + residual,  out = v rstd weight,  new_residual = v
//
// A block takes one group of one row. Each thread loads all of its vectors of x and of the residual, and keeps v in registers
// from the sum of v^2 to the output. Persistent blocks, as the gated norms have (rms_fwd.cuh), take 3 to 4 % longer
// (docs/tuning.md). Saved for backward: rstd per group.
#pragma once

#include "norm/cuda/rms_device.cuh"

namespace ssm_kernels::norm {

template <typename Scalar>
__global__ void __launch_bounds__(kFwdMaxThreads, 2) norm_rms_sum_fwd_kernel(const __grid_constant__ RmsFwdParams p) {
  constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(float)), kVectors = kThreadColumns / kSize;
  constexpr int kOffset = kWarpSize * kSize;  // columns between a thread's vectors
  using Input = Vector<Scalar, kSize>;
  using Residual = Vector<float, kSize>;
  enum { kX, kResidual };
  enum { kOut, kNewResidual };
  static_assert(kFwdMaxThreads <= kMaxWarps * kWarpSize, "one warp adds the sums of a block's warps");
  __shared__ float sums[kMaxWarps];

  const RmsPlace place(p, kSize);
  const RowCursor<kRmsFwdReads> reads(p, p.reads, place);
  const RowCursor<kRmsFwdWrites> writes(p, p.writes, place);
  bool is_valid[kVectors];
  Input x[kVectors];
  Residual residual[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    is_valid[i] = place.first_column + i * kOffset < p.group_size;
    x[i] = is_valid[i] ? Input::load_once(reads.template at<Scalar>(kX, place) + i * kOffset) : Input::zero();
    residual[i] =
        is_valid[i] ? Residual::load_once(reads.template at<float>(kResidual, place) + i * kOffset) : Residual::zero();
  }

  float v[kVectors][kSize], sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    to_values(x[i], v[i]);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      v[i][j] += residual[i][j];
      sum = Math<float>::fma(v[i][j], v[i][j], sum);
    }
    if (is_valid[i]) Residual::round(v[i]).store(writes.template at<float>(kNewResidual, place) + i * kOffset);
  }
  sum = sum_over_block(sum, sums, p.warps, place.warp, place.lane);
  const float rstd = reciprocal_sqrt(Math<float>::fma(sum, p.inverse_size, p.eps));
  if (threadIdx.x == 0) p.rstd[blockIdx.x] = rstd;

  float weight[kVectors][kSize];
  load_weight<Scalar>(p, place, weight);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) v[i][j] = v[i][j] * rstd * weight[i][j];
    if (is_valid[i]) Input::round(v[i]).store(writes.template at<Scalar>(kOut, place) + i * kOffset);
  }
}

template <typename Scalar>
cudaError_t launch_norm_rms_sum_fwd(const NormFwdParams& params, const RmsPlan& plan, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.groups * plan.row_blocks);
  norm_rms_sum_fwd_kernel<Scalar><<<blocks, plan.warps * kWarpSize, 0, stream>>>(make_rms_fwd_params(params, plan));
  return cudaGetLastError();
}

}  // namespace ssm_kernels::norm
