// Blocks that compute maps of segments (segment_fold.cuh).
#pragma once

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Whether the fold does not read the rows of a map from first_row on, which a block would compute: those of a sequence's last
// segment in the direction of time, and T of its first one, whose B has the state before the sequence. There are few sequences.
template <typename Params>
__device__ __forceinline__ bool is_unread_map(const Params& p, int64_t segment, int first_row, bool is_reverse) {
  if (p.first_segments == nullptr) return false;
  int64_t first = 0, end = 0;
#pragma unroll 1
  for (int64_t sequence = 0; sequence < p.sequences && end <= segment; ++sequence) {
    first = p.first_segments[sequence];
    end = p.first_segments[sequence + 1];
  }
  const bool begins = segment == (is_reverse ? end - 1 : first), ends = segment == (is_reverse ? first : end - 1);
  return segment >= end || ends || (begins && first_row >= p.headdim - p.dstate);
}

}  // namespace ssm_kernels::delta_rule
