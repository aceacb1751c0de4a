// Uninitialized tensors for the operators' results and workspaces. at::empty passes the dispatcher twice and at::empty_like
// three times; a call of a scan allocates up to twelve tensors, most of them small.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/TensorOptions.h>

namespace ssm_kernels {

// Contiguous. The options have no memory format and require no gradient. CPU and CUDA tensors come from the device's allocator,
// without the dispatcher, unless a dispatch mode is active, a size is symbolic or PyTorch is to fill the memory
// (torch.use_deterministic_algorithms).
at::Tensor empty_tensor(c10::SymIntArrayRef shape, const at::TensorOptions& options);

// Returns a tensor of the same shape, dtype and device, with the strides of at::empty_like.
at::Tensor empty_tensor_like(const at::Tensor& tensor);
// The same, contiguous.
at::Tensor empty_contiguous_like(const at::Tensor& tensor);
// The same, but with the space behind each row of `tensor`, if that is less than a vector of 16 bytes.
at::Tensor empty_rows_like(const at::Tensor& tensor);

}  // namespace ssm_kernels
