// Batch entries of several sequences. cu_seqlens: sequences packed one after another into a batch of one entry; sequence i has
// the steps cu_seqlens[i] to cu_seqlens[i + 1] - 1, which may be none. seq_idx: the id of each step's sequence. With both,
// sequences begin where either says so, and those of cu_seqlens have states.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch/checks.h"

namespace ssm_kernels {

// Raises unless those of the two that are present are a (batch, seqlen) and a (sequences + 1,) tensor of integers, the latter
// with a batch of one entry. Does not read their values.
void check_sequences(const ArgumentChecks& checks, const std::optional<at::Tensor>& seq_idx,
                     const std::optional<at::Tensor>& cu_seqlens, const c10::SymInt& batch, const c10::SymInt& seqlen);
// Raises unless the values of cu_seqlens, on the CPU, increase from 0 to seqlen; with `has_padding`, to at most seqlen.
void check_cu_seqlens_values(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen, bool has_padding = false);

// The number of states: one for each packed sequence or, without cu_seqlens, for each row of the batch.
c10::SymInt count_states(const std::optional<at::Tensor>& cu_seqlens, const c10::SymInt& batch);

// Allocates states of the given shape. Kernels write those of sequences that have steps; those of others are a copy of `empty`
// or, without it, zero.
at::Tensor allocate_states(const std::optional<at::Tensor>& cu_seqlens, const c10::SymInt& seqlen, c10::SymIntArrayRef shape,
                           const at::TensorOptions& options, const std::optional<at::Tensor>& empty);

// The sequence of each step, int32. Empty sequences have no step. For any values of cu_seqlens the result is a valid index.
at::Tensor sequence_at(const at::Tensor& cu_seqlens, const at::Tensor& steps);

// The parts into which both divide the rows of a batch, in their order, int64, (parts, 5): the row, the part's first step and
// the step after its last, and the state that it starts from and the one that it ends in, or -1. A part starts from the state
// of its row, or of its sequence of cu_seqlens, if it is the first there; it ends in it if it is the last. On CUDA the host
// waits for the number of parts.
at::Tensor sequence_parts(const at::Tensor& seq_idx, const std::optional<at::Tensor>& cu_seqlens);

// Where the id of a step differs from that of the previous step, bool, like ids of shape (batch, seqlen). False at step 0.
at::Tensor sequence_starts(const at::Tensor& ids);

}  // namespace ssm_kernels
