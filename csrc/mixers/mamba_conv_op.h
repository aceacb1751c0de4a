// Between the convolution of a Mamba mixer and its scan.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels::mamba_conv {

// Whether a tensor is the gate that _mamba_conv returned: its gradient is wanted in the right half of a wider buffer.
bool is_gate(const at::Tensor& z);

// The right half of the columns of a new tensor that is twice as wide as z, and the left half of that tensor. As long as
// anybody refers to the left half, the convolution's backward copies the gradient of z instead of writing beside it.
at::Tensor allocate_grad_gate(const at::Tensor& z);
at::Tensor left_of_grad_gate(const at::Tensor& grad_gate);

}  // namespace ssm_kernels::mamba_conv
