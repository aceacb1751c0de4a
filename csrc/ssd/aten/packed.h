// Packed sequences as batches: those that have equally many steps are the rows of one, so that many short ones are scanned
// together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Some of the sequences, of `length` steps each.
struct SequencesOfLength {
  int64_t length, count;
  int64_t first, begin;         // the number of the first, and its first step
  bool are_neighbors;           // one after another: what is taken of a tensor is a view of it
  at::Tensor sequences, steps;  // if not: their numbers, (count,), and their steps, (count * length,)

  // Of a (1, seqlen, ...) tensor, (count, length, ...).
  at::Tensor take_steps(const at::Tensor& tensor) const;
  // Of a (sequences, ...) tensor, (count, ...).
  at::Tensor take_states(const at::Tensor& states) const;
  // The reverse: into such a tensor, unless what was taken of it is a view.
  void put_steps(const at::Tensor& values, const at::Tensor& target) const;
  void put_states(const at::Tensor& values, const at::Tensor& target) const;
};

// All, the shortest first. Reads cu_seqlens on the host and raises unless it cuts the sequence.
std::vector<SequencesOfLength> sequences_by_length(const Inputs& in);

// The call for some of the sequences, as a batch.
Inputs packed_batch(const Inputs& call, const SequencesOfLength& of);

}  // namespace ssm_kernels::ssd
