// Addresses of tensors for kernels whose parameters have one pointer type for inputs and outputs.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels {

enum class Access { kRead, kWrite };

// Reads through const_data_ptr: data_ptr would make a copy-on-write clone copy its memory.
inline void* data_of(const at::Tensor& tensor, Access access) {
  return access == Access::kWrite ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
}

}  // namespace ssm_kernels
