// Packed sequences as batches: sequences of equal length are the rows of one batch, so that many short ones are scanned
// together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Some of the sequences, of `length` steps each.
struct SequencesOfLength {
  int64_t length, count;
  int64_t first, begin;         // the index of the first sequence, and its first step
  bool are_neighbors;           // whether they follow one another: take_steps() then returns a view
  at::Tensor sequences, steps;  // if they do not: their indices, (count,), and their steps, (count * length,)

  // Takes (count, length, ...) from a (1, seqlen, ...) tensor.
  at::Tensor take_steps(const at::Tensor& tensor) const;
  // Takes (count, ...) from a (sequences, ...) tensor.
  at::Tensor take_states(const at::Tensor& states) const;
  // Writes values back into such a tensor, unless a view was taken.
  void put_steps(const at::Tensor& values, const at::Tensor& target) const;
  void put_states(const at::Tensor& values, const at::Tensor& target) const;
};

// All sequences, by length, the shortest first. Reads cu_seqlens on the host and raises unless it partitions the steps.
std::vector<SequencesOfLength> sequences_by_length(const Inputs& in);

// The call for some of the sequences, as a batch.
Inputs packed_batch(const Inputs& call, const SequencesOfLength& of);

}  // namespace ssm_kernels::ssd
