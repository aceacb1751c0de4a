// Backward of RMSNorm followed by a silu or sigmoid gate, for heads: rows of one group that a part of a warp has. It also
// writes the output of forward once more. With y = x rstd, a = a(z) and the mean over the group:
//
//   grad_x = rstd (grad_out a weight - y mean(grad_out a weight y))       grad_z = grad_out a'(z) (y weight)
//   out = (y weight) a                                                    grad_weight = sum over rows of grad_out a y
//
// Blocks, teams, columns and the order of every sum are those of the general kernel (bwd.cuh), which takes rows that start
// between multiples of 16 bytes: both have the same bits. Loops have no options and few addresses, weights and the gate's
// sigmoid stay in registers, and zeros replace rows and columns that do not exist.
#pragma once

#include "common/activations.h"
#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/row_values.cuh"

namespace ssm_kernels::norm {

// Resident blocks that the plan counts on, with kBwdRegisters registers a thread.
constexpr int kShortBwdBlocks = 5;

// The rows of a lane's columns in `count` tensors, in bytes, from one row of the team to the next.
template <typename Scalar, int count>
class ShortCursor {
 public:
  __device__ __forceinline__ ShortCursor(const RowsView (&views)[count], int row, int step, int column) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      constexpr int kBytes = sizeof(Scalar);
      at_[i] = views[i].data == nullptr ? nullptr
                                        : static_cast<char*>(views[i].data) + (row * views[i].stride_inner + column) * kBytes;
      step_[i] = step * views[i].stride_inner * kBytes;
    }
  }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < count; ++i) at_[i] += step_[i];
  }
  __device__ __forceinline__ char* at(int i) const { return at_[i]; }

 private:
  char* at_[count];
  int64_t step_[count];
};

// A team's rows, a lane's columns of these, and its stages of `inputs` tensors in shared memory.
template <typename Scalar, int inputs>
struct ShortRows {
  static constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>, kStages = kBwdStages;
  // Odd, as that of BwdPlan.
  static constexpr int kRecordBytes = (kStages * inputs * kVectors | 1) * kVectorBytes;
  static constexpr int kStageBytes = inputs * kVectors * kVectorBytes;
  using Values = Vector<Scalar, kSize>;

  int lanes, team, lane, rows, group_size;
  int vector_bytes;  // from a vector of the lane to the next
  float size, inverse_size;
  bool divides_exactly;  // by a power of two
  char* record;

  __device__ __forceinline__ ShortRows(const NormParams& p, int lanes, char* records)
      : lanes(lanes),
        team(threadIdx.x / lanes),
        lane(threadIdx.x - team * lanes),
        rows(static_cast<int>(p.rows())),
        group_size(static_cast<int>(p.group_size)),
        vector_bytes(lanes * kVectorBytes),
        size(static_cast<float>(p.group_size)),
        inverse_size(1.0f / size),
        divides_exactly((group_size & (group_size - 1)) == 0),
        record(records + threadIdx.x * kRecordBytes) {}

  __device__ __forceinline__ int column(int i) const { return (i * lanes + lane) * kSize; }
  __device__ __forceinline__ bool is_valid(int i) const { return column(i) < group_size; }
  // Copies a row, or zeros in place of one that does not exist, to a stage that begins at a byte of the record.
  __device__ __forceinline__ void copy(const ShortCursor<Scalar, inputs>& from, bool is_there, int stage) const {
#pragma unroll
    for (int input = 0; input < inputs; ++input) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        cuda::cp_async(record + stage + (input * kVectors + i) * kVectorBytes, from.at(input) + i * vector_bytes,
                       is_there && is_valid(i) ? kVectorBytes : 0);
      }
    }
    cuda::cp_async_commit();
  }
  __device__ __forceinline__ Values load(int stage, int input, int i) const {
    return Values::load(reinterpret_cast<const Scalar*>(record + stage + (input * kVectors + i) * kVectorBytes));
  }
  __device__ __forceinline__ void load_weight(const NormParams& p, float (&weight)[kVectors][kSize]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) weight[i][j] = 0;
      if (is_valid(i)) load_parameter<Scalar>(p.weight, column(i), 1, weight[i]);
    }
  }
  __device__ __forceinline__ float mean_over_team(float sum) const {
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return divides_exactly ? sum * inverse_size : sum / size;
  }
  static __device__ __forceinline__ int next(int stage) {
    return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }
  static __device__ __forceinline__ int previous(int stage) {
    return stage == 0 ? (kStages - 1) * kStageBytes : stage - kStageBytes;
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(kSharedBlockThreads, kShortBwdBlocks)
    norm_rms_short_bwd_kernel(const __grid_constant__ NormBwdParams p, const __grid_constant__ BwdPlan plan) {
  enum { kGradOut, kX, kZ, kInputs };
  using Rows = ShortRows<Scalar, kInputs>;
  using Values = typename Rows::Values;
  constexpr int kSize = Rows::kSize, kVectors = Rows::kVectors, kStages = Rows::kStages;
  extern __shared__ __align__(kVectorBytes) char records[];
  const Rows team(p, plan.teams.lanes, records);
  const bool is_silu = p.activation == GateActivation::kSilu;
  const int first = blockIdx.x * plan.row_teams + team.team, step = plan.partials;
  ShortCursor<Scalar, kInputs> reads({p.grad_out, p.x, p.z}, first, step, team.column(0));
  ShortCursor<Scalar, 3> writes({p.grad_x, p.grad_z, p.out}, first, step, team.column(0));
  int copied = first;
  for (int i = 0; i < kStages - 1; ++i, copied += step, reads.advance()) {
    team.copy(reads, copied < team.rows, i * Rows::kStageBytes);
  }
  float weight[kVectors][kSize], sum_weight[kVectors][kSize] = {};
  team.load_weight(p, weight);
  const auto rstd_of = [&](int row) { return row < team.rows ? static_cast<const float*>(p.rstd)[row] : 0.0f; };
  float next_rstd = rstd_of(first);
  int stage = 0;
  // The bounds are the same for the whole block, because every thread takes part in the sums.
  for (int row = first; row - team.team < team.rows; row += step) {
    const float rstd = next_rstd;
    next_rstd = rstd_of(row + step);
    // Refills the stage of the previous row, which only this thread reads.
    team.copy(reads, copied < team.rows, Rows::previous(stage));
    reads.advance();
    copied += step;
    cuda::cp_async_wait<kStages - 1>();

    float sigmoids[kVectors][kSize], sum = 0;
    const auto gate_of = [&](float z, float s) { return (is_silu ? z : 1.0f) * s; };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Values grad_out = team.load(stage, kGradOut, i), x = team.load(stage, kX, i), z = team.load(stage, kZ, i);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        sigmoids[i][j] = sigmoid(z.accumulate(j));
        const float gated = grad_out.accumulate(j) * gate_of(z.accumulate(j), sigmoids[i][j]), y = x.accumulate(j) * rstd;
        sum = Math<float>::fma(gated * weight[i][j], y, sum);
        sum_weight[i][j] = Math<float>::fma(gated, y, sum_weight[i][j]);
      }
    }
    const float mean = team.mean_over_team(sum);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Values grad_out = team.load(stage, kGradOut, i), x = team.load(stage, kX, i), z = team.load(stage, kZ, i);
      float grad_x[kSize], grad_z[kSize], out[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float g = grad_out.accumulate(j), s = sigmoids[i][j], a = gate_of(z.accumulate(j), s);
        const float y = x.accumulate(j) * rstd, normed = Math<float>::fma(y, weight[i][j], 0.0f);
        grad_x[j] = rstd * Math<float>::fma(-y, mean, g * a * weight[i][j]);
        const float slope = is_silu ? silu_derivative(z.accumulate(j), s) : s * (1.0f - s);
        grad_z[j] = slope * g * normed;
        out[j] = normed * a;
      }
      if (row < team.rows && team.is_valid(i)) {
        const auto store = [&](const RowsView& view, int stream, const float (&values)[kSize]) {
          if (view.data == nullptr) return;
          Values::round(values).store(reinterpret_cast<Scalar*>(writes.at(stream) + i * team.vector_bytes));
        };
        store(p.grad_x, 0, grad_x);
        store(p.grad_z, 1, grad_z);
        store(p.out, 2, out);
      }
    }
    writes.advance();
    stage = Rows::next(stage);
  }

  if (p.partial_weight == nullptr) return;
  float* const target = static_cast<float*>(p.partial_weight) + static_cast<int64_t>(first) * team.group_size;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (team.is_valid(i)) Vector<float, kSize>::round(sum_weight[i]).store(target + team.column(i));
  }
}

}  // namespace ssm_kernels::norm
