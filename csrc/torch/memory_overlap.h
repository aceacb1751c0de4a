// Whether tensors share memory. PyTorch's own check gives no answer for tensors with gaps.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels {

// Whether two elements of a tensor share a byte.
bool has_internal_overlap(const at::Tensor& tensor);

// Whether an element of one tensor shares a byte with an element of the other.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

}  // namespace ssm_kernels
