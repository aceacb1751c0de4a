// Packed sequences as batches: sequences of equal length are the rows of one batch, so that many short ones are scanned
// together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Where tensors of a call have some of its sequences.
struct SequenceRows {
  bool are_steps;  // rows of a (1, seqlen, ...) tensor, `length` for each sequence; else of (sequences, ...), one each
  int64_t first, sequences, length;
  at::Tensor indices;  // of the rows; undefined if they follow one another

  // Takes (sequences, length, ...) or (sequences, ...): a view if the rows follow one another, else a copy.
  at::Tensor take(const at::Tensor& tensor) const;
  OptionalTensor take(const OptionalTensor& tensor) const;
  // For a result: the same view, or uninitialized memory that put() copies to the rows.
  at::Tensor place(const at::Tensor& result) const;
  void put(const at::Tensor& values, const at::Tensor& result) const;
};

// All sequences that have the same number of steps.
struct SequencesOfLength {
  SequenceRows steps, states;
};

// All sequences, by length, the shortest first. Copies cu_seqlens to the host, which synchronizes, and raises
// unless it partitions the steps.
std::vector<SequencesOfLength> sequences_by_length(const Inputs& in);

// The arguments of the call restricted to those sequences, as a batch.
Inputs packed_batch(const Inputs& call, const SequencesOfLength& of);

}  // namespace ssm_kernels::ssd
