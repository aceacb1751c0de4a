// Cuts a long sequence of few heads into segments, which run at the same time. A segment maps the state before it, V x K, to
//
//   S' = S T + B
//
// B, V x K, is the state after a segment that begins with zero; T, K x K, that after a segment without values that begins with
// the identity: rows of a state do not depend on one another. The first segment's B begins with the state before the sequence,
// so that no T follows it. Kernels of forward or backward compute both as one state of V + K rows (segment_maps.cuh). This
// kernel folds the maps in order: a block takes some rows of a head's state from segment to segment, and writes the rows before
// each segment. Products are fp32.
//
// The gradient D of the state has such maps backward in time: D before a segment is D' T^T + B', of D' after it. The kernel
// then folds the segments from the last to the first, and writes the rows after each segment.
#pragma once

#include "cuda/constants.h"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// One block.
__global__ void __launch_bounds__(cuda::kWarpSize)
    delta_rule_segments_kernel(const __grid_constant__ DeltaRuleSegmentsParams p) {
  const bool is_first_lane = threadIdx.x == 0;
  // Clamped: during the capture of a graph nobody checks cu_seqlens.
  const auto start_of = [&](int64_t sequence) {
    if (p.cu_seqlens == nullptr) return sequence * p.seqlen;
    return max(int64_t(0), min(p.cu_seqlens[sequence], p.seqlen));
  };
  int64_t first = 0;
#pragma unroll 1
  for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
    const int64_t start = start_of(sequence), most = p.places - first - (p.sequences - 1 - sequence),
                  needed = (start_of(sequence + 1) - start + p.segment_steps - 1) / p.segment_steps,
                  count = max(int64_t(1), min(needed, most));
    for (int64_t i = threadIdx.x; i < count; i += cuda::kWarpSize) p.bounds[first + i] = start + i * p.segment_steps;
    if (is_first_lane) {
      p.first_segments[sequence] = first;
      p.last_segments[sequence] = first + count - 1;
    }
    first += count;
  }
  for (int64_t i = first + threadIdx.x; i <= p.places; i += cuda::kWarpSize) p.bounds[i] = start_of(p.sequences);
  if (is_first_lane) p.first_segments[p.sequences] = first;
}

// A block's threads, for state tiles of `columns` columns.
constexpr int kFoldThreads = 512;
template <int columns>
constexpr int kFoldRows = columns / 16;

template <int columns>
__global__ void __launch_bounds__(kFoldThreads) delta_rule_fold_kernel(const __grid_constant__ DeltaRuleFoldParams p) {
  constexpr int kRows = kFoldRows<columns>, kParts = kFoldThreads / columns, kOwnRows = kRows / kParts;
  __shared__ float4 before[kRows][columns / 4];
  __shared__ float sums[kParts][kRows][columns];
  const int row_groups = (p.headdim + kRows - 1) / kRows, first_row = static_cast<int>(blockIdx.x) % row_groups * kRows;
  const int64_t head = blockIdx.x / row_groups % p.heads, sequence = blockIdx.x / row_groups / p.heads,
                first = p.first_segments[sequence];
  const int segments = static_cast<int>(p.first_segments[sequence + 1] - first);
  // A thread sums the products of a part of the keys' columns for all rows, and then all parts for its own rows.
  const int column = threadIdx.x % columns, part = threadIdx.x / columns, own = part * kOwnRows;
  const auto has_row = [&](int i) { return first_row + own + i < p.headdim && column < p.dstate; };
  const auto offset = [&](int64_t of_entry, int64_t rows, int i) {
    return ((of_entry * p.heads + head) * rows + first_row + own + i) * p.dstate + column;
  };
  const int groups = p.dstate / 4, groups_of_part = (groups + kParts - 1) / kParts, first_group = part * groups_of_part,
            end_group = column < p.dstate ? min(groups, first_group + groups_of_part) : 0;
  float state[kOwnRows];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    state[i] = p.states != nullptr && has_row(i) ? p.states[offset(sequence, p.headdim, i)] : 0.0f;
  }
#pragma unroll 1
  for (int position = 0; position < segments; ++position) {
    const int64_t map = first + (p.is_reverse ? segments - 1 - position : position);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (has_row(i)) p.starts[offset(map, p.headdim, i)] = state[i];
      reinterpret_cast<float*>(before[own + i])[column] = state[i];
    }
    if (position == segments - 1) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) state[i] = has_row(i) ? p.maps[offset(map, p.map_rows, i)] : 0.0f;
    if (position == 0) continue;
    const float* const factors_of_column = p.maps + ((map * p.heads + head + 1) * p.map_rows - p.dstate) * p.dstate + column;
    float products[kRows] = {};
#pragma unroll 8
    for (int k = first_group; k < end_group; ++k) {
      float factors[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) factors[j] = factors_of_column[(4 * k + j) * p.dstate];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 values = before[i][k];
        // A factor of zero is a decay of zero, which drops Inf and NaN, too.
        if (factors[0] != 0.0f) products[i] = fmaf(values.x, factors[0], products[i]);
        if (factors[1] != 0.0f) products[i] = fmaf(values.y, factors[1], products[i]);
        if (factors[2] != 0.0f) products[i] = fmaf(values.z, factors[2], products[i]);
        if (factors[3] != 0.0f) products[i] = fmaf(values.w, factors[3], products[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[part][i][column] = products[i];
    __syncthreads();
#pragma unroll
    for (int other = 0; other < kParts; ++other) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) state[i] += sums[other][own + i][column];
    }
  }
}

}  // namespace ssm_kernels::delta_rule
