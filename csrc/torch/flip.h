// Steps in the opposite order, for reverse scans whose kernels run forward in time.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels {

// The steps (batch, seqlen, ...) in the opposite order. Rows of whole vectors of 16 bytes are copied as such.
at::Tensor flip_steps(const at::Tensor& steps);
// The same with the strides of empty_tensor_like(like).
at::Tensor flip_steps_like(const at::Tensor& steps, const at::Tensor& like);

}  // namespace ssm_kernels
