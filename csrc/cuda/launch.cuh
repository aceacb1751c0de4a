// What launches of kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ssm_kernels::cuda {

// Lets a kernel have that much dynamic shared memory: more than the default limit must be asked for.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (bytes <= kWithoutAsking) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace ssm_kernels::cuda
