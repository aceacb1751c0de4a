// Segments into which forward and backward cut long sequences of few heads (segment_fold.cuh).
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Times on an H200 in 0.1 us, by which chunks_of_segment() chooses.
struct SegmentTimes {
  int64_t chunk, busy_chunk;  // of a chunk of the scan, and what it takes more if all multiprocessors have a block
  int64_t map_chunk;          // of a chunk of a map (segment_fold.cuh)
  int64_t fold;               // of a segment
  int64_t launches;           // of the additional kernels
};
constexpr SegmentTimes kFwdTimes{20, 2, 16, 30, 400}, kFwdWideTimes{39, 2, 33, 100, 400};
// Both directions in time: two folds.
constexpr SegmentTimes kBwdTimes{22, 10, 20, 60, 400}, kBwdWideTimes{36, 14, 38, 200, 400};
// Those of the kernels with mma.sync, by the columns of a state tile: 64, 128 or 256. Backward takes one direction in time
// after the other. Those of fp32 and 64 or 256 columns are estimates.
constexpr SegmentTimes sm80_times(int64_t key_dim, int64_t element_bytes, bool is_backward) {
  constexpr SegmentTimes kFwd[]{{28, 10, 25, 30, 400}, {38, 16, 40, 30, 400}, {66, 8, 95, 110, 400}},
      kBwd[]{{70, 20, 65, 60, 400}, {92, 30, 95, 65, 400}, {188, 20, 190, 290, 400}},
      kFp32Fwd[]{{100, 60, 85, 30, 1000}, {187, 110, 160, 50, 1000}, {370, 150, 330, 110, 1000}},
      kFp32Bwd[]{{170, 90, 230, 70, 1000}, {318, 190, 436, 120, 1000}, {640, 300, 870, 290, 1000}};
  const int columns = key_dim <= 64 ? 0 : is_wide(key_dim) ? 2 : 1;
  if (element_bytes == 4) return is_backward ? kFp32Bwd[columns] : kFp32Fwd[columns];
  return is_backward ? kBwd[columns] : kFwd[columns];
}

// The sequences of a launch, rows of the batch or packed ones, and their chunks: of packed ones the mean. The lines are
// sequences of heads, and of both directions in time if these run at the same time.
struct SegmentedWork {
  int64_t lines, chunks;
  bool are_packed;
  int64_t value_dim, key_dim;
};
// The chunks of a segment, if cutting each sequence into segments takes less than four fifths of the time, else 0. There are no
// more segments than let each block of the scan have a multiprocessor; blocks of maps may run in several waves.
int64_t chunks_of_segment(const SegmentedWork& work, const SegmentTimes& times, int64_t multiprocessors);

// Whether strides allow as_one_row().
bool is_one_row(const at::Tensor& tensor);
// Rows (1, batch * seqlen, ...).
at::Tensor as_one_row(const at::Tensor& tensor);

// The segments of sequences; DeltaRuleSegmentsParams describes the tensors.
struct Segments {
  int64_t sequences = 0, places = 0;
  at::Tensor bounds, first, last;
};
// Queues the kernel that cuts rows of the batch, or packed sequences if cu_seqlens is defined, after each `chunks` chunks.
Segments cut_sequences(const at::Tensor& cu_seqlens, int64_t rows, int64_t seqlen, int64_t chunks,
                       const at::TensorOptions& options);

// The states before all segments' maps, (places, heads, rows, key_dim), fp32. The first rows, value_dim filled up to whole
// tiles, are zero, but in the first segment of a sequence, in reverse in its last one, they are `states`, those before the
// sequences, if defined. The last key_dim rows are the identity.
at::Tensor map_starts(const Segments& segments, int64_t heads, int64_t value_dim, int64_t key_dim, const at::Tensor& states,
                      bool is_reverse, const at::TensorOptions& options);
// Makes the states of `params` those of `maps`, the results, which have the sizes of map_starts(), and of `starts`.
void describe_maps(DeltaRuleBwdParams& params, const Segments& segments, int64_t value_dim, const at::Tensor& starts,
                   const at::Tensor& maps);
// Queues the fold of `maps`, which has the sizes of map_starts(). Writes the states before all segments (in reverse after them)
// to `starts`, (places, heads, value_dim, key_dim).
void fold_maps(const Segments& segments, const at::Tensor& maps, const at::Tensor& states, bool is_reverse,
               const at::Tensor& starts);

}  // namespace ssm_kernels::delta_rule

#endif
