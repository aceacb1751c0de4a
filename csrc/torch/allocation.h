// Uninitialized tensors for the operators' results and workspaces. at::empty passes the dispatcher twice and at::empty_like
// three times; a call of a scan allocates up to twelve tensors, most of them small.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/TensorOptions.h>

namespace ssm_kernels {

// Contiguous. CPU and CUDA tensors come from the device's allocator, without the dispatcher, unless a dispatch mode is active,
// a size is symbolic or PyTorch is to fill the memory (torch.use_deterministic_algorithms).
at::Tensor empty_tensor(c10::SymIntArrayRef shape, const at::TensorOptions& options);

// Of the tensor's shape, dtype and device, and of its layout as at::empty_like keeps it.
at::Tensor empty_tensor_like(const at::Tensor& tensor);
// The same, contiguous.
at::Tensor empty_contiguous_like(const at::Tensor& tensor);

}  // namespace ssm_kernels
