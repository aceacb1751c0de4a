// The arguments of decoding steps beside their inputs: checks of the tensors that choose cache slots and of their values on the
// CPU, of the buffer of intermediate states, and of what a call writes to.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

#include "common/decoding_rows.h"
#include "torch/checks.h"
#include "torch/memory_overlap.h"

namespace ssm_kernels {

// For indices on the CPU, whose negative values are padding. Raises unless each is below the number of slots and no two rows
// use the same slot: threads process rows in no fixed order.
void check_slot_indices(const char* op, const std::optional<at::Tensor>& indices, int64_t slots);

// The arguments of a decoding call beside those of one step.
struct DecodingOptions {
  std::optional<at::Tensor> state_batch_indices, dst_state_batch_indices;
  std::optional<int64_t> pad_slot_id;
  std::optional<at::Tensor> num_accepted_tokens, cu_seqlens;
  std::optional<at::Tensor> intermediate, intermediate_state_indices;
  bool disable_state_update = false;
};

// Whether rows have slots beside those of `state_batch_indices`: others to write to, or padding that is not negative.
bool has_other_slots(const std::optional<at::Tensor>& state_batch_indices,
                     const std::optional<at::Tensor>& dst_state_batch_indices, std::optional<int64_t> pad_slot_id);

// Raises unless the tensors of integers have the shapes and dtypes for `rows` rows. `tokens` is the number of tokens of each
// row; absent with cu_seqlens. `has_columns`: tables of slots may have a column for each token, among which
// num_accepted_tokens chooses.
void check_decoding_options(const ArgumentChecks& checks, const DecodingOptions& options, const c10::SymInt& rows,
                            const std::optional<c10::SymInt>& tokens, bool has_columns);

// A buffer of intermediate states as messages name it: "(entries, tokens, ...)", where the axes of a state follow.
struct BufferNames {
  const char *name, *axes;
};

// Raises unless the buffer is absent, or an (entries, tokens, ...) tensor of states of this shape and dtype with a place for
// each token and, where no indices choose the entries, an entry for each row. `tokens` is absent with cu_seqlens.
void check_intermediate(const ArgumentChecks& checks, const BufferNames& names, const DecodingOptions& options,
                        c10::SymIntArrayRef state_shape, at::ScalarType dtype, const c10::SymInt& rows,
                        const std::optional<c10::SymInt>& tokens);

// Raises if a tensor that the call writes to shares memory with an argument, with another one that it writes to, or with
// itself. `arguments`: the tensors that it reads, state_batch_indices included; the function adds those of the other options.
void check_writes(const char* op, std::initializer_list<NamedTensor> written, at::ArrayRef<NamedTensor> arguments,
                  const DecodingOptions& options);

// Empty for absent indices.
IndexTable index_table(const std::optional<at::Tensor>& indices);

// The number of rows, from cu_seqlens or from the first axis of x.
c10::SymInt count_rows(const ArgumentChecks& checks, const std::optional<at::Tensor>& cu_seqlens, const at::Tensor& x);

// `tokens` is the number of tokens of each row or, with cu_seqlens, of all rows.
DecodingRows make_decoding_rows(const DecodingOptions& options, int64_t rows, int64_t tokens);

// The number of tokens of a row, or the mean of packed rows, at least 1.
int64_t tokens_per_row(const DecodingRows& rows);

// For tensors on the CPU: raises unless the values of cu_seqlens increase from 0 to at most the number of tokens,
// num_accepted_tokens are from 0 to `most_accepted`, tables have a column for each token, indices are below the numbers of
// slots and of entries, and no slot or entry that a row writes to is used by another row.
void check_decoding_values(const char* op, const DecodingOptions& options, const DecodingRows& rows, int64_t slots,
                           int64_t most_accepted);

}  // namespace ssm_kernels
