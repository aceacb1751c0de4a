// Forward of add_rms_norm with a float32 residual and without bias.
//
//   v = x + residual,  out = v rstd weight,  new_residual = v
//
// A block takes one group of one row. Each thread loads all of its vectors of x and of the residual, and keeps v in registers
// from the sum of v^2 to the output. Persistent blocks, as the gated norms have (rms_fwd.cuh), take 3 to 4 % longer
// (docs/tuning/norms.md). With is_any, warps copy their columns to shared memory first (rms_rows.cuh). Saved for backward:
// rstd per group.
#pragma once

#include "norm/cuda/rms_rows.cuh"
#include "norm/cuda/team_sum.cuh"

namespace ssm_kernels::norm {

template <typename Scalar, bool is_any>
__global__ void __launch_bounds__(kFwdMaxThreads, 2) norm_rms_sum_fwd_kernel(const __grid_constant__ RmsFwdParams p) {
  constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(float)), kVectors = kThreadColumns / kSize;
  constexpr int kOffset = kWarpSize * kSize;  // columns between a thread's vectors
  using Input = Vector<Scalar, kSize>;
  using Residual = Vector<float, kSize>;
  enum { kX, kResidual };
  enum { kOut, kNewResidual };
  static_assert(kFwdMaxThreads <= kMaxWarps * kWarpSize, "one warp adds the sums of a block's warps");
  __shared__ float sums[(is_any ? cuda::kMaxClusterBlocks : 1) * kMaxWarps];
  extern __shared__ __align__(kVectorBytes) char rms_shared[];  // with is_any: the rows of x and of the residual

  const RmsPlace<is_any> place(p, kSize);
  const RowCursor<kRmsFwdReads> reads(p, p.reads, place);
  const RowCursor<kRmsFwdWrites> writes(p, p.writes, place);
  bool is_valid[kVectors];
  Input x[kVectors];
  Residual residual[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    is_valid[i] = place.first_column + i * kOffset < place.columns;
    if constexpr (is_any) continue;
    x[i] = is_valid[i] ? Input::load_once(reads.template at<Scalar>(kX, place) + i * kOffset) : Input::zero();
    residual[i] =
        is_valid[i] ? Residual::load_once(reads.template at<float>(kResidual, place) + i * kOffset) : Residual::zero();
  }

  // With is_any: a lane's vectors of x, and its pieces of both rows.
  using StagedX = StagedInput<Scalar, kSize, kVectors, true>;
  using StagedResidual = StagedInput<float, kSize, kVectors, true>;
  static_assert(StagedResidual::kLaneBytes == kVectorBytes, "a lane's vectors of the residual are its pieces");
  char* const x_segment = rms_shared + place.warp * (StagedX::kBytes + StagedResidual::kBytes);
  char *const x_vector = x_segment + place.lane * StagedX::kLaneBytes, *const x_piece = x_segment + place.lane * kVectorBytes,
              *const residual_piece = x_piece + StagedX::kBytes;
  if constexpr (is_any) {
    const int left = place.left_of_warp();
    StagedX::Segment::copy(x_piece, reads.template segment<Scalar>(kX, place), left * static_cast<int>(sizeof(Scalar)),
                           place.lane);
    StagedResidual::Segment::copy(residual_piece, reads.template segment<float>(kResidual, place),
                                  left * static_cast<int>(sizeof(float)), place.lane);
    if (p.cluster > 1) cuda::cluster_barrier();  // the shared memory of all blocks can be written to from here on
    cuda::cp_async_wait();
    __syncwarp();
    StagedX::Segment::align(x_piece, reads.past(kX));
    StagedResidual::Segment::align(residual_piece, reads.past(kResidual));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = StagedX::load(x_vector, i);
      residual[i] = StagedResidual::load(residual_piece, i);
    }
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
  }
  store_values<StagedResidual, float>(writes, kNewResidual, place, v, is_valid, x_segment + StagedX::kBytes);
  sum = sum_over_group(sum, p, place, sums, 0);
  const float rstd = reciprocal_sqrt(Math<float>::fma(sum, p.inverse_size, p.eps));
  if (threadIdx.x == 0 && (!is_any || cuda::cluster_rank() == 0)) p.rstd[place.first_row * p.groups + place.group] = rstd;

  float weight[kVectors][kSize];
  load_weight<Scalar>(p, place, weight);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) v[i][j] = v[i][j] * rstd * weight[i][j];
  }
  store_values<StagedX, Scalar>(writes, kOut, place, v, is_valid, x_segment);
}

template <typename Scalar>
cudaError_t launch_norm_rms_sum_fwd(const NormFwdParams& params, const RmsPlan& plan, cudaStream_t stream) {
  const auto kernel = plan.is_any ? norm_rms_sum_fwd_kernel<Scalar, true> : norm_rms_sum_fwd_kernel<Scalar, false>;
  return launch_rms(kernel, params.groups, plan, stream, make_rms_fwd_params(params, plan));
}

}  // namespace ssm_kernels::norm
