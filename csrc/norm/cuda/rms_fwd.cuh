// Forward of RMSNorm with a silu gate and without bias. rms_sum_fwd.cuh has add_rms_norm, fwd.cuh all other norms.
//
//   gate before:  v = x z sigmoid(z),  out = v rstd weight
//   gate after:   v = x,               out = v rstd weight z sigmoid(z)
//
// Persistent blocks: a block takes one group of every row_step-th row and keeps the weights of its columns in registers
// (rms_rows.cuh). Each thread copies its vectors of x and z kStages - 1 rows ahead into its own stages of shared memory by
// cp.async, which takes no registers and no barrier. The one barrier per row is in the sum of v^2; v stays in registers from
// there to the output. Saved for backward: rstd per group. Where the groups are on several devices, one launch writes the sums
// and another reads the means (norm.h): branches that are the same for the whole grid, because further instantiations would
// lengthen the build.
#pragma once

#include "cuda/launch.cuh"
#include "norm/cuda/rms_rows.cuh"
#include "norm/cuda/team_sum.cuh"

namespace ssm_kernels::norm {

template <typename Scalar, RmsCase rms_case, bool is_any>
__global__ void __launch_bounds__(kFwdMaxThreads, 2) norm_rms_fwd_kernel(const __grid_constant__ RmsFwdParams p) {
  constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(Scalar)), kVectors = kThreadColumns / kSize;
  constexpr int kStages = rms_stages(2 * static_cast<int>(sizeof(Scalar))), kOffset = kWarpSize * kSize;
  using Input = StagedInput<Scalar, kSize, kVectors, is_any>;
  constexpr int kStageBytes = 2 * Input::kBytes;
  enum { kX, kZ };
  enum { kOut };
  static_assert(kFwdMaxThreads <= kMaxWarps * kWarpSize, "one warp adds the sums of a block's warps");
  extern __shared__ __align__(kVectorBytes) char rms_shared[];

  const RmsPlace<is_any> place(p, kSize);
  bool is_valid[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) is_valid[i] = place.first_column + i * kOffset < place.columns;

  char* const warp_stages = rms_shared + kRmsSumBytes + place.warp * (kStages * kStageBytes);
  char* const first_stage = warp_stages + cuda::opaque(place.lane * Input::kLaneBytes);
  char* const first_z = first_stage + Input::kBytes;
  if constexpr (!is_any) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (is_valid[i]) continue;
      for (int stage = 0; stage < kStages; ++stage) {
        Input::clear(first_stage + stage * kStageBytes, i);
        Input::clear(first_z + stage * kStageBytes, i);
      }
    }
  }

  RowCursor<kRmsFwdReads> reads(p, p.reads, place);
  // Where the rows of all stages start past multiples of 16 bytes, the newest first.
  ShiftQueue<kRmsFwdReads, kStages> shifts;
  const auto copy = [&](int row, int stage_offset) {
    if constexpr (is_any) {
      const int left = place.left_of_warp() * static_cast<int>(sizeof(Scalar));
      char* const x = first_stage + stage_offset;
      if (row < p.rows) {
        Input::Segment::copy(x, reads.template segment<Scalar>(kX, place), left, place.lane);
        Input::Segment::copy(x + Input::kBytes, reads.template segment<Scalar>(kZ, place), left, place.lane);
      }
      shifts.push(reads);
    } else if (row < p.rows) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!is_valid[i]) continue;
        Input::copy(first_stage + stage_offset, i, reads.template at<Scalar>(kX, place));
        Input::copy(first_z + stage_offset, i, reads.template at<Scalar>(kZ, place));
      }
    }
    cuda::cp_async_commit();
    reads.advance(p, p.reads);
  };
  for (int i = 0; i < kStages - 1; ++i) copy(place.first_row + i * p.row_step, i * kStageBytes);
  RowCursor<1> writes(p, p.writes, place);
  float weight[kVectors][kSize];
  load_weight<Scalar>(p, place, weight);
  if (is_any && p.cluster > 1) cuda::cluster_barrier();  // the shared memory of all blocks can be written to from here on

  char* const stages_end = rms_shared + kRmsSumBytes + p.warps * (kStages * kStageBytes);
  float* const sums = reinterpret_cast<float*>(is_any && p.cluster > 1 ? stages_end : rms_shared);
  const bool writes_sums = p.sums != nullptr;
  int stage_offset = 0, buffer = 0;
  for (int row = place.first_row; row < p.rows; row += p.row_step) {
    const int statistic = row * p.groups + place.group;
    // Loaded this early so that the sums hide the latency.
    const float group_mean = p.group_mean == nullptr ? 0.0f : p.group_mean[statistic];
    if constexpr (is_any) __syncwarp();
    // Refills the stage of the previous row, which only this thread reads, or with is_any its warp.
    copy(row + (kStages - 1) * p.row_step, stage_offset == 0 ? (kStages - 1) * kStageBytes : stage_offset - kStageBytes);
    cuda::cp_async_wait<kStages - 1>();
    if constexpr (is_any) {
      __syncwarp();
      Input::Segment::align(first_stage + stage_offset, shifts.past(kX));
      Input::Segment::align(first_z + stage_offset, shifts.past(kZ));
    }
    char* const stage = first_stage + stage_offset;
    const char* const z_stage = first_z + stage_offset;

    float v[kVectors][kSize], sum = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      to_values(Input::load(stage, i), v[i]);
      if constexpr (rms_case == RmsCase::kGateBefore) {
        const auto z = Input::load(z_stage, i);
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[i][j] *= silu(z.accumulate(j));
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum = Math<float>::fma(v[i][j], v[i][j], sum);
    }
    float rstd;
    if (p.group_mean == nullptr) {
      sum = sum_over_group(sum, p, place, sums, buffer);
      rstd = reciprocal_sqrt(Math<float>::fma(sum, p.inverse_size, p.eps));
    } else {
      rstd = reciprocal_sqrt(group_mean + p.eps);
    }
    if (threadIdx.x == 0 && (!is_any || cuda::cluster_rank() == 0))
      (writes_sums ? p.sums : p.rstd)[statistic] = writes_sums ? sum : rstd;

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) v[i][j] = v[i][j] * rstd * weight[i][j];
      if constexpr (rms_case == RmsCase::kGateAfter) {
        const auto z = Input::load(z_stage, i);
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[i][j] *= silu(z.accumulate(j));
      }
      if constexpr (is_any) {
        Input::replace(stage, i, Input::Values::round(v[i]));
      } else {
        Scalar* const out = writes.template at<Scalar>(kOut, place) + i * kOffset;
        if (is_valid[i] && !writes_sums) Input::Values::round(v[i]).store(out);
      }
    }
    if constexpr (is_any) {
      __syncwarp();
      const int left = place.left_of_warp() * static_cast<int>(sizeof(Scalar));
      if (!writes_sums) Input::Segment::store(writes.template segment<Scalar>(kOut, place), stage, left, place.lane);
    }
    writes.advance(p, p.writes);
    buffer ^= kMaxWarps;
    stage_offset = stage_offset == (kStages - 1) * kStageBytes ? 0 : stage_offset + kStageBytes;
  }
}

template <typename Scalar>
auto norm_rms_fwd_kernel_for(const RmsPlan& plan) {
  void (*kernel)(RmsFwdParams) = nullptr;
  if (plan.rms_case == RmsCase::kGateBefore) {
    kernel = plan.is_any ? norm_rms_fwd_kernel<Scalar, RmsCase::kGateBefore, true>
                         : norm_rms_fwd_kernel<Scalar, RmsCase::kGateBefore, false>;
  } else {
    kernel = plan.is_any ? norm_rms_fwd_kernel<Scalar, RmsCase::kGateAfter, true>
                         : norm_rms_fwd_kernel<Scalar, RmsCase::kGateAfter, false>;
  }
  return kernel;
}

template <typename Scalar>
int count_norm_rms_fwd_clusters(const RmsPlan& plan) {
  return count_rms_clusters(norm_rms_fwd_kernel_for<Scalar>(plan), plan);
}

template <typename Scalar>
cudaError_t launch_norm_rms_fwd(const NormFwdParams& params, const RmsPlan& plan, cudaStream_t stream) {
  return launch_rms(norm_rms_fwd_kernel_for<Scalar>(plan), params.groups, plan, stream, make_rms_fwd_params(params, plan));
}

}  // namespace ssm_kernels::norm
