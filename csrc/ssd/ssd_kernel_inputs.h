// The tensors of a call as the SSD kernels read and write them: rows of whole pieces at multiples of 16 bytes, padded with
// zeros where they are not so.
#pragma once

#include <ATen/core/Tensor.h>

#include "ssd/ssd_cuda.h"
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

// Those of a call's inputs but for z; lives as long as the inputs.
class KernelInputs {
 public:
  KernelInputs(const Inputs& in, Discretization method);

  void fill(SsdParams& params) const;
  Partition partition() const;

  // Uninitialized, with the kernels' headdim and dstate.
  at::Tensor empty_states() const;
  // States, padded and aligned.
  at::Tensor as_states(const at::Tensor& states) const;
  bool pads_states() const { return more_rows_ > 0 || more_columns_ > 0; }

  const at::Tensor x, B, C;

 private:
  const Inputs& in_;
  const Discretization method_;
  const int64_t more_rows_, more_columns_, sequences_;
  at::Tensor A_, dt_bias_, D_, cu_seqlens_, resets_, initial_states_;
};

// Raises if a call has more of its kernels' blocks, or chunks, than they count.
void check_count(int64_t count, const char* of);

}  // namespace ssm_kernels::ssd
