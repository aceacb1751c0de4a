// Segments into which forward and backward cut long sequences of few heads (segment_fold.cuh).
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Whether strides allow as_one_row().
bool is_one_row(const at::Tensor& tensor);
// Rows (1, batch * seqlen, ...).
at::Tensor as_one_row(const at::Tensor& tensor);

// cu_seqlens of the segments of `chunks` chunks of all rows of the batch, whose steps are one row.
at::Tensor segment_bounds(int64_t batch, int64_t seqlen, int64_t chunks, const at::TensorOptions& options);

// The states before all segments' maps, (segments, heads, rows, key_dim): the first rows, value_dim filled up to whole tiles,
// are zero, and the last key_dim rows are the identity.
at::Tensor map_starts(int64_t segments, int64_t heads, int64_t value_dim, int64_t key_dim, const at::TensorOptions& fp32);

// Parameters of the fold of `maps`, which has the sizes of map_starts(), for states of value_dim rows.
DeltaRuleFoldParams fold_of(const at::Tensor& maps, int64_t batch, int64_t value_dim);

}  // namespace ssm_kernels::delta_rule

#endif
