// The tensors of a call in the layout of the SSD kernels: rows of whole vectors, with zeros after the last element, and states
// with an even number of columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "cuda/row_copies.h"
#include "ssd/cuda/launch.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Properties of the rows of a tensor (batch, seqlen, heads, row). Each implies those after it.
// Vectors of 16 bytes of contiguous elements, that begin at multiples of 16 bytes.
bool has_vectors(const at::Tensor& tensor);
// Pairs of contiguous elements, that begin at multiples of their size: what kernels store.
bool has_pairs(const at::Tensor& tensor);
// Whether the last axis is contiguous, or has one element.
bool has_contiguous_rows(const at::Tensor& tensor);
// Uninitialized, of the same shape and dtype but for the rows, which are padded to vectors.
at::Tensor empty_padded_like(const at::Tensor& tensor);
// Copies between the caller's tensors and the kernels', which one launch makes (cuda/row_copies.h).
class PendingCopies {
 public:
  // A tensor whose rows are vectors, the last one filled up with zeros in memory: the tensor itself, or one that launch()
  // fills.
  at::Tensor as_rows(const at::Tensor& tensor);
  // Copies rows, of which the target may have fewer elements, or more: these become zeros. The axes before them are alike.
  void add(const at::Tensor& source, const at::Tensor& target);
  void launch();

 private:
  cuda::RowCopies copies_;
  std::vector<at::Tensor> kept_;  // what they read and write
};

// With reverse, step 0 of a view is the tensor's last step.
RowsView rows_view(const at::Tensor& tensor, bool reverse = false);
RowsView const_rows_view(const at::Tensor& tensor, bool reverse = false);
// The same with strides in bytes, as those of given gates.
RowsView in_bytes(RowsView view, const at::Tensor& tensor);
// Strips padding: the leading target.size(-2) x target.size(-1) block.
at::Tensor without_padding(const at::Tensor& padded, const at::Tensor& target);

// A result. Kernels write `written`, which is the target itself if its layout allows.
class KernelResult {
 public:
  KernelResult(at::Tensor target, at::Tensor written) : written(std::move(written)), target_(std::move(target)) {}

  // Call it after the kernels' launch.
  void finish(PendingCopies& copies) const {
    if (!written.is_same(target_)) copies.add(written, target_);
  }

  const at::Tensor written;

 private:
  const at::Tensor target_;
};
// A result for `target`, with padded rows unless the kernels can write the target's.
KernelResult result_as_rows(const at::Tensor& target, bool is_written);

// The inputs of a call without z. Refers to them, and must not outlive them.
class KernelInputs {
 public:
  // Kernels may read them after the launch of `copies`.
  KernelInputs(const Inputs& in, Discretization method, PendingCopies& copies);

  void fill(SsdParams& params) const;
  // Fills the views of log decays and gains, if they are given.
  void fill(GivenGates& gates) const;
  // From a log decay to its gain on the diagonal, in bytes, if that is given.
  int64_t diagonal_gain_offset() const { return has_diagonal_gain() ? offset_from_log_decay(diagonal_gain_) : 0; }
  int rank_shift() const { return in_.rank_shift; }
  bool has_given_gates() const { return log_decay_.defined(); }
  bool has_diagonal_gain() const { return diagonal_gain_.defined(); }
  at::ScalarType dtype_of_given_gates() const { return log_decay_.scalar_type(); }
  const Rotation* rotation() const { return in_.rotation; }
  WorkPartition partition() const;
  bool is_reverse() const { return in_.reverse; }

  // Columns of states in memory: dstate, rounded up to an even number, in fp32 to a multiple of 4.
  int64_t state_columns() const;
  // Uninitialized.
  at::Tensor empty_states() const;
  // States with so many columns, aligned to 16 bytes.
  at::Tensor as_states(const at::Tensor& states, PendingCopies& copies) const;
  KernelResult result_as_states(const at::Tensor& target) const;
  // How many elements of such states come before those of the sequence, or row of the batch, that is scanned first.
  int64_t offset_of_first_states() const;

  const at::Tensor x, B, C;

 private:
  // From the states of one entry of the scan to those of the next. A reverse scan takes packed sequences from the last to the
  // first.
  int64_t states_stride_entry() const;
  int64_t offset_from_log_decay(const at::Tensor& gate) const;

  const Inputs& in_;
  const Discretization method_;
  const int64_t sequences_;
  at::Tensor A_, dt_bias_, log_decay_, gain_, diagonal_gain_, D_, cu_seqlens_, resets_, initial_states_;
};

// The shared memory that a block may have on the device of x, within the limit of DebugOption::kSsdSharedBytes.
int max_shared_bytes(const at::Tensor& x);

// Raises if a count exceeds the 32-bit integers of the kernels.
void check_count(int64_t count, const char* of);

}  // namespace ssm_kernels::ssd
