// Packed sequences as batches: sequences of equal length are the rows of one batch, so that many short ones are scanned
// together.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

namespace ssm_kernels {

// Where tensors of a call have some of its sequences.
struct SequenceRows {
  bool are_steps;  // rows of a (1, seqlen, ...) tensor, `length` for each sequence; else of (sequences, ...), one each
  int64_t first, sequences, length;
  at::Tensor indices;  // of the rows; undefined if they follow one another

  // Takes (sequences, length, ...) or (sequences, ...): a view if the rows follow one another, else a copy.
  at::Tensor take(const at::Tensor& tensor) const;
  std::optional<at::Tensor> take(const std::optional<at::Tensor>& tensor) const;
  // For a result: the same view, or uninitialized memory that put() copies to the rows.
  at::Tensor place(const at::Tensor& result) const;
  void put(const at::Tensor& values, const at::Tensor& result) const;
};

// All sequences that have the same number of steps.
struct SequencesOfLength {
  SequenceRows steps, states;
};

// Whether the state after the first `position` steps of all is one of the sequence: it follows one of its steps, or is before
// the first step of all.
inline bool is_in_sequence(int64_t position, int64_t first, int64_t length) {
  return length > 0 && position <= first + length && (position > first || (position == 0 && first == 0));
}

// All sequences, by length, with indices on `device`; each sequence of one of the positions by itself. Copies cu_seqlens to the
// host, which synchronizes, and raises, in the name of `op`, unless it partitions the steps.
std::vector<SequencesOfLength> sequences_by_length(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen,
                                                   at::Device device, at::IntArrayRef positions = {});

}  // namespace ssm_kernels
