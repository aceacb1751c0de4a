// Tensors as the delta rule's kernels take them, (batch, seqlen, heads, row): rows of whole vectors of 16 bytes, and their
// descriptors for TMA.
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include "delta_rule/delta_rule.h"
#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Whether rows are contiguous, consist of whole vectors and begin at multiples of 16 bytes.
bool are_vectors(const at::Tensor& tensor);
// An uninitialized tensor of the same sizes, whose rows are rounded up to whole vectors.
at::Tensor empty_vectors(const at::Tensor& like);
// The tensor itself if are_vectors(), else a copy whose rows end in zeros.
at::Tensor as_vectors(const at::Tensor& tensor);
// States (entries, value_heads, value_dim, key_dim): the tensor itself if it is contiguous, begins at a multiple of 16 bytes
// and has rows of an even number of elements, else such a copy, whose rows of an odd number end in a zero.
at::Tensor as_states(const at::Tensor& states);

// With seq_idx, flags of the steps at which a sequence begins inside a row or a packed sequence, (batch, seqlen), contiguous.
at::Tensor resets_of(const Inputs& in);

// Describes tiles of `rows` steps and 64 elements of a row.
void describe_tiles(cuda::TmaDescriptor& descriptor, const at::Tensor& tensor, int64_t rows = kChunk);
// Describes tiles of kChunk updates of a tensor that has a row for each `updates` of them (load_update_tile() in
// step_tiles.cuh).
void describe_update_tiles(cuda::TmaDescriptor& descriptor, const at::Tensor& tensor, int64_t updates);

// The address and the strides. Kernels may write to it.
RowsView view_of(const at::Tensor& tensor);
// The same with the steps in the opposite order.
RowsView reversed_view_of(const at::Tensor& tensor);

}  // namespace ssm_kernels::delta_rule

#endif
