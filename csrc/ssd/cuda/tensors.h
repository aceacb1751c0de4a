// The tensors of a call as the SSD kernels read and write them: rows of whole pieces at multiples of 16 bytes, padded with
// zeros where they are not so, and states of as many rows and columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "ssd/cuda/launch.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Whether kernels can move the rows of a tensor (batch, seqlen, heads, row): contiguous, of whole pieces, aligned.
bool has_rows(const at::Tensor& tensor);
// A tensor with such rows.
at::Tensor as_rows(const at::Tensor& tensor);
RowsView rows_view(const at::Tensor& tensor);
RowsView const_rows_view(const at::Tensor& tensor);
// What of a padded tensor was asked for: as much as target has along its last axes.
at::Tensor without_padding(const at::Tensor& padded, const at::Tensor& target);

// A result: kernels write `written`, which is the target itself if they can write that.
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
// One that is to have the shape of `like` with its padding.
KernelResult result_as_rows(const at::Tensor& target, const at::Tensor& like);

// Those of a call's inputs but for z; lives as long as the inputs.
class KernelInputs {
 public:
  KernelInputs(const Inputs& in, Discretization method);

  void fill(SsdParams& params) const;
  WorkPartition partition() const;

  // Uninitialized, with the kernels' headdim and dstate.
  at::Tensor empty_states() const;
  // States, padded and aligned.
  at::Tensor as_states(const at::Tensor& states) const;
  KernelResult result_as_states(const at::Tensor& target) const;

  const at::Tensor x, B, C;

 private:
  const Inputs& in_;
  const Discretization method_;
  const int64_t more_rows_, more_columns_, sequences_;
  at::Tensor A_, dt_bias_, D_, cu_seqlens_, resets_, initial_states_;
};

// The shared memory that a block may have on the device of x, within the limit of DebugOption::kSsdSharedBytes.
int max_shared_bytes(const at::Tensor& x);

// Raises if a call has more of its kernels' blocks, or chunks, than they count.
void check_count(int64_t count, const char* of);

}  // namespace ssm_kernels::ssd
