// What launches of kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <set>
#include <utility>

namespace ssm_kernels::cuda {

// Lets a kernel have that much dynamic shared memory: more than the default limit must be asked for. It is given all that the
// device has, so that what one thread asks for never takes from what another is about to launch with; each thread asks once
// for a kernel and device.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (bytes <= kWithoutAsking) return cudaSuccess;
  const void* const function = reinterpret_cast<const void*>(kernel);
  int device = 0, available = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  static thread_local std::set<std::pair<const void*, int>> allowed;
  if (allowed.count({function, device}) > 0) return cudaSuccess;
  cudaError_t error = cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, function);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               available - static_cast<int>(attributes.sharedSizeBytes));
  if (error == cudaSuccess) allowed.insert({function, device});
  return error;
}

// Whether the kernel, as it is compiled for the current device, takes blocks of that many threads. Where the device lacks the
// instructions of a kernel, it is compiled, empty, for fewer.
template <typename Kernel>
bool is_compiled_for_threads(Kernel kernel, int threads) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess &&
         attributes.maxThreadsPerBlock >= threads;
}

}  // namespace ssm_kernels::cuda
