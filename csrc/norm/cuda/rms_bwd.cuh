// Backward of RMSNorm without bias: with a silu gate before or after the norm, or without gate, which add_rms_norm uses too.
// bwd.cuh has the kernels for all other norms. With y = v rstd, g = grad_out, and gy the gradient of y weight:
//
//   S = sum(gy weight v) over the group,  k = rstd^3 S / size
//   grad_v = rstd gy weight - k v,  grad_weight = sum over rows of gy y
//
//   gate before:  v = x a,  gy = g,    grad_x = grad_v a,  grad_z = grad_v x a'
//   gate after:   v = x,    gy = g a,  grad_x = grad_v,    grad_z = g y weight a'
//   no gate:      v = x,    gy = g,    grad_x = grad_residual = grad_v + grad_new_residual
//
// a = z s with s = sigmoid(z), and a' = s + a (1 - s).
//
// Persistent blocks: a block takes one group of every row_step-th row, with weights and the sums for grad_weight in registers
// (rms_rows.cuh). Each thread copies rstd and its vectors of grad_out, x and z (or grad_new_residual) kStages - 1 rows ahead
// into its own stages of shared memory by cp.async, which takes no registers and no barrier. It reads a stage twice: for S,
// whose sum over the block has the one barrier per row, and for the gradients. s stays in registers in between, so that the
// exponential is evaluated once. Each block writes its sums for grad_weight as a row of partial sums, and norm_sum_kernel adds
// these rows in order.
//
// Where the groups are on several devices, one launch writes S rstd and another takes S rstd / size, the mean (norm.h). These
// are branches that are the same for the whole grid.
//
// With a float32 residual (kNoGateWide), x and grad_new_residual are float32 and grad_out is fp16 or bf16. Vectors then have 4
// columns, 16 bytes of the former and 8 of the latter, so that each access of a warp is contiguous. With 8 columns, each of the
// two accesses to a float32 vector would touch every sector of both.
#pragma once

#include "cuda/launch.cuh"
#include "norm/cuda/rms_rows.cuh"
#include "norm/cuda/team_sum.cuh"

namespace ssm_kernels::norm {

// Bytes of a column in a stage: grad_out, x, and z or grad_new_residual.
template <typename Scalar, RmsCase rms_case>
constexpr int kRmsBwdColumnBytes = sizeof(Scalar) + 2 * (rms_case == RmsCase::kNoGateWide ? sizeof(float) : sizeof(Scalar));

template <typename Scalar, RmsCase rms_case, bool is_any>
__global__ void __launch_bounds__(kBwdMaxThreads, 1) norm_rms_bwd_kernel(const __grid_constant__ RmsBwdParams p) {
  constexpr bool kBefore = rms_case == RmsCase::kGateBefore, kAfter = rms_case == RmsCase::kGateAfter;
  constexpr bool kHasGate = kBefore || kAfter;
  // Element type of x, and of z or grad_new_residual.
  using Wide = std::conditional_t<rms_case == RmsCase::kNoGateWide, float, Scalar>;
  // Element type of grad_z or grad_residual.
  using Second = std::conditional_t<kHasGate, Scalar, float>;
  constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(Wide)), kVectors = kThreadColumns / kSize;
  constexpr int kStages = rms_stages(kRmsBwdColumnBytes<Scalar, rms_case>), kOffset = kWarpSize * kSize;
  using GradOut = StagedInput<Scalar, kSize, kVectors, is_any>;
  using Input = StagedInput<Wide, kSize, kVectors, is_any>;
  using Rstd = StagedInput<float, 1, 1, false>;
  // With is_any: whether the second gradient passes through shared memory, in the place of x. With fp16 or bf16 activations and
  // no float32 residual, a float32 gradient has no room there.
  constexpr bool kStagesSecond = std::is_same_v<Second, Wide>;
  // Whether forward's output can be written, too: with the same products and so the same bits.
  constexpr bool kWritesOut = kHasGate && !is_any;
  static_assert(Rstd::kLaneBytes == kRmsBwdRowBytes, "the plan counts rstd's bytes in shared memory");
  // With is_any, the warp has one copy of rstd.
  constexpr int kRstdBytes = is_any ? kVectorBytes : Rstd::kBytes;
  constexpr int kStageBytes = GradOut::kBytes + 2 * Input::kBytes + kRstdBytes;
  static_assert(3 * kShiftedInputBytes + kVectorBytes <= Rstd::kBytes,
                "with is_any as many blocks are resident, so that sums over rows have the same bits");
  enum { kReadGradOut, kReadX, kReadThird };
  enum { kGradX, kSecondGrad, kOut };
  static_assert(kBwdMaxThreads <= kMaxWarps * kWarpSize, "one warp adds the sums of a block's warps");
  extern __shared__ __align__(kVectorBytes) char rms_shared[];

  const RmsPlace<is_any> place(p, kSize);
  bool is_valid[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) is_valid[i] = place.first_column + i * kOffset < place.columns;

  float weight[kVectors][kSize], sum_weight[kVectors][kSize] = {};
  load_weight<Scalar>(p, place, weight);

  // Lane offsets differ between inputs of different widths.
  char* const warp_stages = rms_shared + kRmsSumBytes;
  const int first_stage = place.warp * (kStages * kStageBytes);
  char* const first_grad_out = warp_stages + cuda::opaque(first_stage + place.lane * GradOut::kLaneBytes);
  char* const first_x = warp_stages + GradOut::kBytes +
                        (GradOut::kLaneBytes == Input::kLaneBytes ? static_cast<int>(first_grad_out - warp_stages)
                                                                  : cuda::opaque(first_stage + place.lane * Input::kLaneBytes));
  char* const first_third = first_x + Input::kBytes;
  char* const first_rstd =
      warp_stages + kStageBytes - kRstdBytes + cuda::opaque(first_stage + (is_any ? 0 : place.lane * Rstd::kLaneBytes));
  const bool has_third = kHasGate || p.reads[kReadThird].data != nullptr;
  if constexpr (!is_any) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (is_valid[i]) continue;
      for (int stage = 0; stage < kStages; ++stage) {
        GradOut::clear(first_grad_out + stage * kStageBytes, i);
        Input::clear(first_x + stage * kStageBytes, i);
        Input::clear(first_third + stage * kStageBytes, i);
      }
    }
  }

  RowCursor<kRmsBwdReads> reads(p, p.reads, place);
  // With is_any: where the rows of all stages start past multiples of 16 bytes, and the thread's first piece of grad_out.
  ShiftQueue<kRmsBwdReads, kStages> shifts;
  static_assert(Input::kLaneBytes == kVectorBytes, "a lane's vectors of x are its pieces");
  char* const grad_out_piece = first_x - GradOut::kBytes;
  const auto copy_shifted = [&](int row, int stage) {
    const int left = place.left_of_warp();
    if (row < p.rows) {
      if (place.lane == 0) Rstd::copy(first_rstd + stage, 0, p.rstd + (row * p.groups + place.group));
      const auto copy_wide = [&](char* piece, int stream) {
        const char* const first = reads.template segment<Wide>(stream, place);
        Input::Segment::copy(piece + stage, first, left * static_cast<int>(sizeof(Wide)), place.lane);
      };
      GradOut::Segment::copy(grad_out_piece + stage, reads.template segment<Scalar>(kReadGradOut, place),
                             left * static_cast<int>(sizeof(Scalar)), place.lane);
      copy_wide(first_x, kReadX);
      if (has_third) copy_wide(first_third, kReadThird);
    }
    cuda::cp_async_commit();
    shifts.push(reads);
    reads.advance(p, p.reads);
  };
  const auto copy = [&](int row, int stage) {
    if constexpr (is_any) return copy_shifted(row, stage);
    const Scalar* const grad_out = reads.template at<Scalar>(kReadGradOut, place);
    const Wide* const x = reads.template at<Wide>(kReadX, place);
    const Wide* const third = reads.template at<Wide>(kReadThird, place);
    if (row < p.rows) {
      Rstd::copy(first_rstd + stage, 0, p.rstd + (row * p.groups + place.group));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!is_valid[i]) continue;
        GradOut::copy(first_grad_out + stage, i, grad_out);
        Input::copy(first_x + stage, i, x);
        if (kHasGate) Input::copy(first_third + stage, i, third);
      }
      if (!kHasGate && has_third) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (is_valid[i]) Input::copy(first_third + stage, i, third);
        }
      }
    }
    cuda::cp_async_commit();
    reads.advance(p, p.reads);
  };
  for (int i = 0; i < kStages - 1; ++i) copy(place.first_row + i * p.row_step, i * kStageBytes);
  RowCursor<kWritesOut ? 3 : 2> writes(p, p.writes, place);
  if (is_any && p.cluster > 1) cuda::cluster_barrier();  // the shared memory of all blocks can be written to from here on

  char* const stages_end = rms_shared + kRmsSumBytes + p.warps * (kStages * kStageBytes);
  float* const sums = reinterpret_cast<float*>(is_any && p.cluster > 1 ? stages_end : rms_shared);
  int stage = 0, buffer = 0;
  for (int row = place.first_row; row < p.rows; row += p.row_step) {
    const int statistic = row * p.groups + place.group;
    // Loaded this early so that the sums hide the latency.
    const float group_mean = p.group_mean == nullptr ? 0.0f : p.group_mean[statistic];
    if constexpr (is_any) __syncwarp();
    // Refills the stage of the previous row, which only this thread reads, or with is_any its warp.
    copy(row + (kStages - 1) * p.row_step, stage == 0 ? (kStages - 1) * kStageBytes : stage - kStageBytes);
    cuda::cp_async_wait<kStages - 1>();
    if constexpr (is_any) {
      __syncwarp();
      GradOut::Segment::align(grad_out_piece + stage, shifts.past(kReadGradOut));
      Input::Segment::align(first_x + stage, shifts.past(kReadX));
      if (has_third) Input::Segment::align(first_third + stage, shifts.past(kReadThird));
      if constexpr (GradOut::kLaneBytes != kVectorBytes) __syncwarp();
    }
    const float rstd = Rstd::load(first_rstd + stage, 0)[0];

    float s[kHasGate ? kVectors : 1][kSize], sum = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto grad_out = GradOut::load(first_grad_out + stage, i);
      const auto x = Input::load(first_x + stage, i);
      typename Input::Values z;
      if constexpr (kHasGate) z = Input::load(first_third + stage, i);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        float v = x.accumulate(j), gy = grad_out.accumulate(j);
        if constexpr (kHasGate) {
          s[i][j] = sigmoid(z.accumulate(j));
          const float a = z.accumulate(j) * s[i][j];
          (kBefore ? v : gy) *= a;
        }
        const float term = gy * v;
        sum = Math<float>::fma(term, weight[i][j], sum);
        sum_weight[i][j] = Math<float>::fma(term, rstd, sum_weight[i][j]);
      }
    }
    float mean;  // of gy weight y
    if (p.group_mean == nullptr) {
      sum = sum_over_group(sum, p, place, sums, buffer) * rstd;
      if (p.sums != nullptr && threadIdx.x == 0 && (!is_any || cuda::cluster_rank() == 0)) p.sums[statistic] = sum;
      mean = sum * p.inverse_size;
    } else {
      mean = group_mean;
    }
    const float k = mean * (rstd * rstd);
    if constexpr (kWritesOut) {
      if (p.writes[kOut].data != nullptr) {
        Scalar* const out = writes.template at<Scalar>(kOut, place);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const auto x = Input::load(first_x + stage, i), z = Input::load(first_third + stage, i);
          float normed[kSize];
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            const float a = z.accumulate(j) * s[i][j];
            normed[j] = (kBefore ? x.accumulate(j) * a : x.accumulate(j)) * rstd * weight[i][j];
            if (kAfter) normed[j] *= a;
          }
          if (is_valid[i]) Input::Values::round(normed).store(out + i * kOffset);
        }
      }
    }
    Scalar* const grad_x_row = is_any ? nullptr : writes.template at<Scalar>(kGradX, place);
    Second* const second_row = is_any ? nullptr : writes.template at<Second>(kSecondGrad, place);

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (p.sums != nullptr) break;
      const auto grad_out = GradOut::load(first_grad_out + stage, i);
      const auto x = Input::load(first_x + stage, i);
      typename Input::Values third;
      if constexpr (kHasGate) third = Input::load(first_third + stage, i);
      float grad_x[kSize], grad_z[kSize];
      if constexpr (kBefore) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const float a = third.accumulate(j) * s[i][j], v = x.accumulate(j) * a;
          const float grad_v = Math<float>::fma(grad_out.accumulate(j) * weight[i][j], rstd, -(v * k));
          grad_x[j] = grad_v * a;
          // x a' = x s + v (1 - s)
          grad_z[j] = grad_v * Math<float>::fma(v, 1.0f - s[i][j], x.accumulate(j) * s[i][j]);
        }
      } else if constexpr (kAfter) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const float v = x.accumulate(j), a = third.accumulate(j) * s[i][j];
          grad_x[j] = Math<float>::fma(grad_out.accumulate(j) * a * weight[i][j], rstd, -(v * k));
          const float slope = Math<float>::fma(a, 1.0f - s[i][j], s[i][j]);
          grad_z[j] = grad_out.accumulate(j) * (v * rstd * weight[i][j]) * slope;
        }
      } else {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          grad_x[j] = Math<float>::fma(grad_out.accumulate(j) * weight[i][j], rstd, -(x.accumulate(j) * k));
        }
      }
      if constexpr (!kHasGate) {
        if (has_third) {
          third = Input::load(first_third + stage, i);
#pragma unroll
          for (int j = 0; j < kSize; ++j) grad_x[j] += third.accumulate(j);
        }
      }
      if (!is_any && !is_valid[i]) continue;
      const auto& second = kHasGate ? grad_z : grad_x;
      using SecondVector = Vector<Second, kSize>;
      if constexpr (is_any) {
        GradOut::replace(first_grad_out + stage, i, GradOut::Values::round(grad_x));
        if constexpr (kStagesSecond) {
          Input::replace(first_x + stage, i, SecondVector::round(second));
        } else if (p.writes[kSecondGrad].data != nullptr) {
          Second* const target = writes.template at<Second>(kSecondGrad, place) + i * kOffset;
          cuda::store_shifted(target, SecondVector::round(second), place.left(i * kOffset));
        }
      } else {
        if (p.writes[kGradX].data != nullptr) GradOut::Values::round(grad_x).store(grad_x_row + i * kOffset);
        if (p.writes[kSecondGrad].data != nullptr) SecondVector::round(second).store(second_row + i * kOffset);
      }
    }
    if constexpr (is_any) {
      __syncwarp();
      const int left = place.left_of_warp();
      if (p.writes[kGradX].data != nullptr && p.sums == nullptr) {
        GradOut::Segment::store(writes.template segment<Scalar>(kGradX, place), grad_out_piece + stage,
                                left * static_cast<int>(sizeof(Scalar)), place.lane);
      }
      if (kStagesSecond && p.writes[kSecondGrad].data != nullptr && p.sums == nullptr) {
        Input::Segment::store(writes.template segment<Second>(kSecondGrad, place), first_x + stage,
                              left * static_cast<int>(sizeof(Second)), place.lane);
      }
    }
    writes.advance(p, p.writes);
    buffer ^= kMaxWarps;
    stage = stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }

  if (p.partial_weight == nullptr) return;
  const auto target_at = [&](const RmsPlace<is_any>& at) {
    return p.partial_weight + (static_cast<int64_t>(at.first_row) * p.groups + at.group) * p.group_size + at.block_column +
           at.first_column;
  };
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (is_any) {
      // Computed again: kept in registers over the rows, the place would spill.
      const RmsPlace<is_any> last(p, kSize, cuda::opaque(static_cast<unsigned int>(blockIdx.x)));
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (j < last.left(i * kOffset)) target_at(last)[i * kOffset + j] = sum_weight[i][j];
      }
    } else {
      if (is_valid[i]) Vector<float, kSize>::round(sum_weight[i]).store(target_at(place) + i * kOffset);
    }
  }
}

template <typename Scalar>
auto norm_rms_bwd_kernel_for(const RmsPlan& plan) {
  const auto choose = [&](auto rms_case) -> void (*)(RmsBwdParams) {
    constexpr RmsCase kCase = decltype(rms_case)::value;
    return plan.is_any ? norm_rms_bwd_kernel<Scalar, kCase, true> : norm_rms_bwd_kernel<Scalar, kCase, false>;
  };
  if (plan.rms_case == RmsCase::kGateBefore) return choose(std::integral_constant<RmsCase, RmsCase::kGateBefore>());
  if (plan.rms_case == RmsCase::kGateAfter) return choose(std::integral_constant<RmsCase, RmsCase::kGateAfter>());
  if constexpr (sizeof(Scalar) == 2) {
    if (plan.rms_case == RmsCase::kNoGateWide) return choose(std::integral_constant<RmsCase, RmsCase::kNoGateWide>());
  }
  return choose(std::integral_constant<RmsCase, RmsCase::kNoGate>());
}

template <typename Scalar>
int count_norm_rms_bwd_clusters(const RmsPlan& plan) {
  return count_rms_clusters(norm_rms_bwd_kernel_for<Scalar>(plan), plan);
}

template <typename Scalar>
cudaError_t launch_norm_rms_bwd(const NormBwdParams& params, const RmsPlan& plan, cudaStream_t stream) {
  RmsBwdParams p;
  fill_rms_params(p, params, plan);
  p.reads[0] = make_row_stream(params, plan, params.grad_out);
  p.reads[1] = make_row_stream(params, plan, params.x);
  p.reads[2] = make_row_stream(params, plan, params.is_add ? params.grad_new_residual : params.z);
  p.writes[0] = make_row_stream(params, plan, params.grad_x);
  p.writes[1] = make_row_stream(params, plan, params.is_add ? params.grad_residual : params.grad_z);
  p.writes[2] = make_row_stream(params, plan, params.out);
  p.partial_weight = static_cast<float*>(params.partial_weight);
  return launch_rms(norm_rms_bwd_kernel_for<Scalar>(plan), params.groups, plan, stream, p);
}

}  // namespace ssm_kernels::norm
