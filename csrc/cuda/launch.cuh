// What launches of kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace ssm_kernels::cuda {

// A kernel on a device. What the runtime says of it never changes, so that each thread asks once.
using KernelOnDevice = std::pair<const void*, int>;

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
  static thread_local std::set<KernelOnDevice> allowed;
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
// instructions of a kernel, it is compiled, empty, for fewer. A query that fails means no, is made again next time, and leaves
// no error that a later cudaGetLastError() would report as that of another kernel.
template <typename Kernel>
bool is_compiled_for_threads(Kernel kernel, int threads) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  static thread_local std::map<KernelOnDevice, int> most_threads;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    const auto known = most_threads.find({function, device});
    if (known != most_threads.end()) return known->second >= threads;
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, function);
    if (error == cudaSuccess) {
      most_threads[{function, device}] = attributes.maxThreadsPerBlock;
      return attributes.maxThreadsPerBlock >= threads;
    }
  }
  cudaGetLastError();
  return false;
}

}  // namespace ssm_kernels::cuda
