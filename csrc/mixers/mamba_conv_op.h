// Interface between the convolution of a Mamba mixer and its scan: where the scan writes the gradient of the gate.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels::mamba_conv {

// Whether a tensor is the gate that _mamba_conv returned, whose gradient belongs into the right half of a wider buffer.
bool is_gate(const at::Tensor& z);

// allocate_grad_gate returns the right half of the columns of a new tensor twice as wide as z, left_of_grad_gate the left half
// of that tensor. While the left half is referenced, the convolution's backward copies the gradient of z to another buffer
// instead of writing beside it.
at::Tensor allocate_grad_gate(const at::Tensor& z);
at::Tensor left_of_grad_gate(const at::Tensor& grad_gate);

}  // namespace ssm_kernels::mamba_conv
