// Between the convolution of a Mamba mixer and its scan.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels::mamba_conv {

// Whether a tensor is the gate that _mamba_conv returned: its gradient is wanted in the right half of a wider buffer.
bool is_gate(const at::Tensor& z);

// The right half of the columns of a new tensor that is twice as wide as z. Nobody refers to the left half.
at::Tensor allocate_grad_gate(const at::Tensor& z);

}  // namespace ssm_kernels::mamba_conv
