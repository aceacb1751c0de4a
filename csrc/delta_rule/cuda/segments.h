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
  int64_t fold, fold_growth;  // of a segment in the fold, and what it takes more for each segment that there is
  int64_t launches;           // of the additional kernels
};
constexpr SegmentTimes kFwdTimes{20, 0, 14, 60, 0, 400}, kFwdWideTimes{40, 0, 30, 120, 0, 400};
// Both directions in time: two folds.
constexpr SegmentTimes kBwdTimes{22, 10, 20, 40, 25, 300}, kBwdWideTimes{40, 10, 35, 80, 50, 300};
// The kernels with mma.sync, one direction in time after the other.
constexpr SegmentTimes fwd_sm80_times(int64_t key_dim, int64_t element_bytes) { return {38, 0, 30, 60, 0, 400}; }
constexpr SegmentTimes bwd_sm80_times(int64_t key_dim, int64_t element_bytes) { return {80, 10, 60, 80, 50, 400}; }

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
