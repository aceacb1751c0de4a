// Addresses of tensors for kernels whose parameters use one type of pointer for what they read and what they write.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels {

enum class Access { kRead, kWrite };

// A tensor that is only read stays a lazy (copy-on-write) clone if it is one: data_ptr() would copy it.
inline void* data_of(const at::Tensor& tensor, Access access) {
  return access == Access::kWrite ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
}

}  // namespace ssm_kernels
