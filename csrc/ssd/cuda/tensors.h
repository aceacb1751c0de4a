// The tensors of a call in the layout of the SSD kernels: rows aligned to 16 bytes and padded with zeros to a multiple of 16
// bytes, and states padded to the same numbers of rows and columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "ssd/cuda/launch.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Whether kernels can move the rows of a tensor (batch, seqlen, heads, row): contiguous, aligned, a multiple of 16 bytes.
bool has_rows(const at::Tensor& tensor);
// A tensor with such rows.
at::Tensor as_rows(const at::Tensor& tensor);
// With reverse, step 0 of a view is the tensor's last step.
RowsView rows_view(const at::Tensor& tensor, bool reverse = false);
RowsView const_rows_view(const at::Tensor& tensor, bool reverse = false);
// Strips padding: the leading target.size(-2) x target.size(-1) block.
at::Tensor without_padding(const at::Tensor& padded, const at::Tensor& target);

// A result. Kernels write `written`, which is the target itself if its layout allows.
class KernelResult {
 public:
  KernelResult(at::Tensor target, at::Tensor written) : written(std::move(written)), target_(std::move(target)) {}

  void finish() const {
    if (!written.is_same(target_)) target_.copy_(without_padding(written, target_));
  }

  const at::Tensor written;

 private:
  const at::Tensor target_;
};
// A result for `target`, padded to the shape of `like`.
KernelResult result_as_rows(const at::Tensor& target, const at::Tensor& like);

// The inputs of a call without z. Refers to them, and must not outlive them.
class KernelInputs {
 public:
  KernelInputs(const Inputs& in, Discretization method);

  void fill(SsdParams& params) const;
  WorkPartition partition() const;
  bool is_reverse() const { return in_.reverse; }

  // Uninitialized, with the kernels' headdim and dstate.
  at::Tensor empty_states() const;
  // States, padded and aligned.
  at::Tensor as_states(const at::Tensor& states) const;
  KernelResult result_as_states(const at::Tensor& target) const;
  // How many elements of such states come before those of the sequence, or row of the batch, that is scanned first.
  int64_t offset_of_first_states() const;

  const at::Tensor x, B, C;

 private:
  // From the states of one entry of the scan to those of the next. A reverse scan takes packed sequences from the last to the
  // first.
  int64_t states_stride_entry() const;

  const Inputs& in_;
  const Discretization method_;
  const int64_t more_rows_, more_columns_, sequences_;
  at::Tensor A_, dt_bias_, D_, cu_seqlens_, resets_, initial_states_;
};

// The shared memory that a block may have on the device of x, within the limit of DebugOption::kSsdSharedBytes.
int max_shared_bytes(const at::Tensor& x);

// Raises if a count exceeds the 32-bit integers of the kernels.
void check_count(int64_t count, const char* of);

}  // namespace ssm_kernels::ssd
