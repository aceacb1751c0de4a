// Packed sequences as batches: sequences of equal length are the rows of one batch, so that many short ones are scanned
// together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// All sequences that have `length` steps.
struct SequencesOfLength {
  int64_t length, count;
  int64_t first, begin;         // the index of the first sequence, and its first step
  bool are_neighbors;           // whether they follow one another: the functions below then take views
  at::Tensor sequences, steps;  // if they do not: their indices, (count,), and their steps, (count * length,)

  // Takes (count, length, ...) from a (1, seqlen, ...) tensor.
  at::Tensor take_steps(const at::Tensor& tensor) const;
  // Takes (count, ...) from a (sequences, ...) tensor.
  at::Tensor take_states(const at::Tensor& states) const;
  // Copies values into such a tensor. Does nothing if are_neighbors: the caller has written through the view.
  void put_steps(const at::Tensor& values, const at::Tensor& target) const;
  void put_states(const at::Tensor& values, const at::Tensor& target) const;
};

// All sequences, by length, the shortest first. Copies cu_seqlens to the host, which synchronizes, and raises
// unless it partitions the steps.
std::vector<SequencesOfLength> sequences_by_length(const Inputs& in);

// The arguments of the call restricted to those sequences, as a batch.
Inputs packed_batch(const Inputs& call, const SequencesOfLength& of);

}  // namespace ssm_kernels::ssd
