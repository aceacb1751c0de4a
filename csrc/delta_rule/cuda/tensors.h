// Tensors as the delta rule's kernels take them: rows of vectors of 16 bytes, described for TMA.
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Whether the rows of a (batch, seqlen, heads, row) tensor consist of whole vectors.
bool are_vectors(const at::Tensor& tensor);
// Uninitialized, with rows rounded up to whole vectors.
at::Tensor empty_vectors(const at::Tensor& like);
// Rows as vectors of 16 bytes, the last filled up with zeros.
at::Tensor as_vectors(const at::Tensor& tensor);

// Describes tiles of kChunk steps and 64 elements of a row.
void describe_tiles(cuda::TmaDescriptor& descriptor, const at::Tensor& tensor);

RowsView view_of(const at::Tensor& tensor);

}  // namespace ssm_kernels::delta_rule

#endif
