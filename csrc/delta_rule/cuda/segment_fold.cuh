// Cuts a long sequence of few heads into segments, which run at the same time. A segment maps the state before it, V x K, to
//
//   S' = S T + B
//
// B, V x K, is the state after a segment that begins with zero; T, K x K, that after a segment without values that begins with
// the identity: rows of a state do not depend on one another. The kernel of forward computes both as one state of V + K rows
// (launch_fwd.cpp). This kernel folds the maps in order: a block takes kFoldRows rows of a head's state from segment to
// segment, and writes the rows before each segment. A thread has one column of some of the rows. Products are fp32.
//
// The gradient D of the state has such maps backward in time: D before a segment is D' T^T + B', of D' after it. The kernel
// then folds the segments from the last to the first, and writes the rows after each segment.
#pragma once

#include "cuda/constants.h"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

constexpr int kFoldRows = 16, kFoldThreads = 256;

__global__ void __launch_bounds__(kFoldThreads) delta_rule_fold_kernel(const __grid_constant__ DeltaRuleFoldParams p) {
  constexpr int kRowsAtOnce = kFoldThreads / kStateColumns, kOwnRows = kFoldRows / kRowsAtOnce;
  __shared__ float4 before[kFoldRows][kStateColumns / 4];
  const int row_groups = (p.headdim + kFoldRows - 1) / kFoldRows,
            first_row = static_cast<int>(blockIdx.x) % row_groups * kFoldRows;
  const int64_t head = blockIdx.x / row_groups % p.heads, entry = blockIdx.x / row_groups / p.heads;
  const int column = threadIdx.x % kStateColumns, own = threadIdx.x / kStateColumns;  // the first of the thread's rows
  const auto has_row = [&](int i) { return first_row + own + i * kRowsAtOnce < p.headdim && column < p.dstate; };
  const auto offset = [&](int64_t of_entry, int64_t rows, int i) {
    return ((of_entry * p.heads + head) * rows + first_row + own + i * kRowsAtOnce) * p.dstate + column;
  };
  float state[kOwnRows];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    state[i] = p.states != nullptr && has_row(i) ? p.states[offset(entry, p.headdim, i)] : 0.0f;
  }
#pragma unroll 1
  for (int position = 0; position < p.segments; ++position) {
    const int64_t map = entry * p.segments + (p.is_reverse ? p.segments - 1 - position : position);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (has_row(i)) p.starts[offset(map, p.headdim, i)] = state[i];
      reinterpret_cast<float*>(before[own + i * kRowsAtOnce])[column] = state[i];
    }
    if (position == p.segments - 1) return;
    __syncthreads();
    const float* const columns = p.maps + ((map * p.heads + head + 1) * p.map_rows - p.dstate) * p.dstate + column;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) state[i] = has_row(i) ? p.maps[offset(map, p.map_rows, i)] : 0.0f;
    const int groups = column < p.dstate ? p.dstate / 4 : 0;
#pragma unroll 8
    for (int k = 0; k < groups; ++k) {
      float factors[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) factors[j] = columns[(4 * k + j) * p.dstate];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const float4 values = before[own + i * kRowsAtOnce][k];
        state[i] = fmaf(values.x, factors[0], state[i]);
        state[i] = fmaf(values.y, factors[1], state[i]);
        state[i] = fmaf(values.z, factors[2], state[i]);
        state[i] = fmaf(values.w, factors[3], state[i]);
      }
    }
    __syncthreads();
  }
}

}  // namespace ssm_kernels::delta_rule
