// The factors of the matrices of pairs F and B (bwd_chunks.cuh).
#pragma once

#include "delta_rule/cuda/bwd_workspace.cuh"

namespace ssm_kernels::delta_rule {

// F and B of g E^T and dv E^T: products with factors of rows and columns, zero above the diagonal. An exponent of two steps is
// split at the warp's first row left of the diagonal blocks, as in apply_decays() (step_pairs.cuh). There all warps run the
// same code: to fetch code of their own takes longer than the work.
__device__ __forceinline__ void apply_factors(const DeltaRuleBwdParams& p, float (&f)[kStepBlocks][4],
                                              float (&b)[kStepBlocks][4], const DeltaRuleTables& tables,
                                              const FragmentLane& lane) {
  const float log2_of_first = tables.log2_cumsum[lane.row - lane.quad];
  float log2_of_row[2], f_factors[2], b_factors[2], decays[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    log2_of_row[half] = tables.log2_cumsum[row];
    decays[half] = Math<float>::exp2(log2_of_row[half] - log2_of_first);
    f_factors[half] = tables.query_factor[row];
    b_factors[half] = -key_row_factor(tables, row, 1.0f);
  }
#pragma unroll
  for (int n = 0; n < kStepBlocks - 2; ++n) {
    if (n >= 2 * lane.warp) break;
    const float2 log2 = column_pair(tables.log2_cumsum, n, lane), beta = column_pair(tables.beta, n, lane);
    const float of_columns[2] = {beta.x * Math<float>::exp2(log2_of_first - log2.x),
                                 beta.y * Math<float>::exp2(log2_of_first - log2.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[n][i] *= f_factors[i / 2] * (decays[i / 2] * of_columns[i % 2]);
      b[n][i] *= b_factors[i / 2] * (decays[i / 2] * of_columns[i % 2]);
    }
  }
  float factors[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 log2 = column_pair(tables.log2_cumsum, 2 * lane.warp + n, lane),
                 beta = column_pair(tables.beta, 2 * lane.warp + n, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int distance = lane.quad + 8 * (i / 2) - (kBlockSteps * n + 2 * lane.pair + i % 2);
      // Above the diagonal the decay may be Inf: it is selected.
      const float decay = Math<float>::exp2(log2_of_row[i / 2] - (i % 2 == 0 ? log2.x : log2.y));
      factors[n][i] = distance >= 0 ? (i % 2 == 0 ? beta.x : beta.y) * decay : 0.0f;
    }
  }
  visit_warp(lane, [&](auto warp) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int distance = lane.quad + 8 * (i / 2) - (kBlockSteps * n + 2 * lane.pair + i % 2);
        float &of_f = f[2 * warp + n][i], &of_b = b[2 * warp + n][i];
        of_f = distance >= 0 ? of_f * (f_factors[i / 2] * factors[n][i]) : 0.0f;
        of_b = distance > 0 ? of_b * (b_factors[i / 2] * factors[n][i]) : 0.0f;
      }
    }
#pragma unroll
    for (int n = 2 * warp + 2; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f[n][i] = b[n][i] = 0;
    }
  });
  if (!has_reset(p, tables)) return;
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kBlockSteps * n + 2 * lane.pair + i % 2 < tables.first[lane.row + 8 * (i / 2)]) f[n][i] = b[n][i] = 0;
    }
  }
}

}  // namespace ssm_kernels::delta_rule
