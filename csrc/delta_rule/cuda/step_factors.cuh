// The kernel that computes what the delta rule's kernels read for each step beside q, k and v: with qk_l2norm the factors
// (x . x + 1e-6)^-1/2 of the rows of k and q; the log decays, of raw gates; beta, of raw values. A block takes kFactorSteps
// steps of a key head, and of its value heads.
#pragma once

#include "cuda/constants.h"
#include "delta_rule/cuda/gate_arguments.cuh"
#include "delta_rule/cuda/step_updates.cuh"

namespace ssm_kernels::delta_rule {

constexpr int kFactorSteps = 64, kFactorThreads = 256;

template <typename Scalar>
__global__ void __launch_bounds__(kFactorThreads) delta_rule_factors_kernel(const __grid_constant__ DeltaRuleFactorsParams p) {
  constexpr int kLanes = 16, kStepsAtOnce = kFactorSteps * kLanes / kFactorThreads;  // of a row, and rows of a thread
  const int heads_of_key = p.value_heads_per_key_head;
  const unsigned key_heads = static_cast<unsigned>(p.heads / heads_of_key),
                 blocks_of_row = static_cast<unsigned>((p.seqlen + kFactorSteps - 1) / kFactorSteps);
  const int64_t key_head = blockIdx.x % key_heads, batch = blockIdx.x / key_heads / blocks_of_row,
                first = int64_t(blockIdx.x / key_heads % blocks_of_row) * kFactorSteps;
  if (p.row_factors.data != nullptr) {
    using Vector = cuda::Vector<Scalar, kRowElements>;
    const int64_t begin = first + threadIdx.x / kLanes * kStepsAtOnce;
    const int lane = threadIdx.x % kLanes;
    float sums[2][kStepsAtOnce] = {};
    for (int column = lane * kRowElements; column < p.dstate; column += kLanes * kRowElements) {
      Vector rows[2][kStepsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < 2 * kStepsAtOnce; ++i) {
        const bool is_query = i % 2 != 0;
        const RowsView& view = is_query ? p.q : p.k;
        const int64_t step = begin + i / 2, row_of_step = is_query ? step >> p.log2_updates : step;
        const Scalar* const row = static_cast<const Scalar*>(view.data) + batch * view.stride_batch +
                                  row_of_step * view.stride_step + key_head * view.stride_head + column;
        if (step < p.seqlen) rows[i % 2][i / 2] = *reinterpret_cast<const Vector*>(row);
      }
#pragma unroll
      for (int i = 0; i < 2 * kStepsAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kRowElements; ++j) {
          const float value = rows[i % 2][i / 2].accumulate(j);
          sums[i % 2][i / 2] = fmaf(value, value, sums[i % 2][i / 2]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
      float factors[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float sum = sums[row][i];
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(cuda::kAllLanes, sum, distance);
        factors[row] = rsqrtf(sum + static_cast<float>(kNormEpsilon));
      }
      if (lane == 0 && begin + i < p.seqlen) {
        reinterpret_cast<float2&>(fp32_at(p.row_factors, batch, begin + i, key_head)) = {factors[0], factors[1]};
      }
    }
  }
  for (int i = threadIdx.x; i < heads_of_key * kFactorSteps; i += kFactorThreads) {
    const int64_t step = first + i % kFactorSteps, head = key_head * heads_of_key + i / kFactorSteps;
    if (step >= p.seqlen) continue;
    const DeltaRuleGateOptions& options = p.options;
    if (p.log_decay.data != nullptr && is_first_update(p, static_cast<int>(step))) {
      const int64_t row = step >> p.log2_updates;
      float gate = argument_at<Scalar>(p.raw_gate, p.gate_is_fp32, batch, row, head);
      if (options.has_raw_gate) {
        const GateOfHead of_head(options, head);
        visit_gate(options, [&](auto is_bounded) { gate = of_head.log_decay<is_bounded>(options, gate); });
      }
      fp32_at(p.log_decay, batch, row, head) = gate;
    }
    if (p.beta.data != nullptr) {
      fp32_at(p.beta, batch, step, head) = write_strength(argument_at<Scalar>(p.raw_beta, p.beta_is_fp32, batch, step, head),
                                                          options.beta_sigmoid, options.allow_neg_eigval);
    }
  }
}

}  // namespace ssm_kernels::delta_rule
