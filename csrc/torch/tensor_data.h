// Addresses and strides of tensors for kernels whose parameters have one pointer type for inputs and outputs.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels {

enum class Access { kRead, kWrite };

// Reads through const_data_ptr: data_ptr would make a copy-on-write clone copy its memory.
inline void* data_of(const at::Tensor& tensor, Access access) {
  return access == Access::kWrite ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
}

// Zero for an axis of size 1, whose stride is arbitrary and may be unaligned.
inline int64_t stride_of(const at::Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

}  // namespace ssm_kernels
