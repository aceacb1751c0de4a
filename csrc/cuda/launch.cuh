// Launches of kernels, and the attributes that a kernel or a launch needs first.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace ssm_kernels::cuda {

// A kernel on a device, as a key. Its attributes never change, so each thread queries them once.
using KernelOnDevice = std::pair<const void*, int>;

// Raises a kernel's limit of dynamic shared memory if `bytes` exceed the default. The new limit is all that the device has: a
// smaller one could be below the limit that another thread has just set and is about to launch with. Each thread sets it once
// for a kernel and device.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes) {
  // The default is 48 KiB, of which static shared memory takes up to 8.
  constexpr size_t kDefaultBytes = 40 * 1024;
  if (bytes <= kDefaultBytes) return cudaSuccess;
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

// A kernel's attributes on the current device. A failed query returns nothing and is not cached. Its error is cleared: a later
// cudaGetLastError() would report it as another kernel's.
template <typename Kernel>
std::optional<cudaFuncAttributes> attributes_of(Kernel kernel) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  static thread_local std::map<KernelOnDevice, cudaFuncAttributes> kept;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    const auto known = kept.find({function, device});
    if (known != kept.end()) return known->second;
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, function);
    if (error == cudaSuccess) return kept[{function, device}] = attributes;
  }
  cudaGetLastError();
  return std::nullopt;
}

// Whether the kernel's code for the current device accepts blocks of `threads` threads. A kernel whose instructions the device
// lacks is compiled with an empty body and fewer threads. A failed query returns false.
template <typename Kernel>
bool is_compiled_for_threads(Kernel kernel, int threads) {
  const auto attributes = attributes_of(kernel);
  return attributes && attributes->maxThreadsPerBlock >= threads;
}

// Whether the kernel's code for the current device waits for the previous kernel if it is launched with PDL: code for
// compute capability 8.0 does not, and a newer device may run it. A failed query returns false.
template <typename Kernel>
bool has_pdl(Kernel kernel) {
  const auto attributes = attributes_of(kernel);
  return attributes && attributes->ptxVersion >= 90;
}

// The configuration of a launch. It points to `attribute`, which counts if has_attribute.
inline cudaLaunchConfig_t launch_config(int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                                        cudaLaunchAttribute& attribute, bool has_attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = has_attribute ? 1 : 0;
  return config;
}

// Launches a kernel. With `uses_pdl` it may start before the previous kernel of the stream has finished (cuda/ptx/pdl.cuh); the
// device then has compute capability 9.0 or newer.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, bool uses_pdl,
                   const Params&... params) {
  cudaLaunchAttribute pdl;
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config = launch_config(blocks, threads, shared_bytes, stream, pdl, uses_pdl);
  return cudaLaunchKernelEx(&config, kernel, params...);
}

// The configuration of a launch in clusters of `cluster` blocks. It points to `attribute`.
inline cudaLaunchConfig_t cluster_config(int64_t blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream,
                                         cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return launch_config(blocks, threads, shared_bytes, stream, attribute, cluster > 1);
}

// Launches a kernel in clusters of `cluster` blocks, which needs compute capability 9.0 unless it is 1.
template <typename... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, int cluster,
                            cudaStream_t stream, const Params&... params) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = cluster_config(blocks, threads, shared_bytes, cluster, stream, attribute);
  return cudaLaunchKernelEx(&config, kernel, params...);
}

// How many clusters of a kernel are resident on the current device at a time. Each thread queries a launch once. A failed query
// returns 0.
template <typename Kernel>
int resident_clusters(Kernel kernel, int threads, int shared_bytes, int cluster) {
  struct Launch {
    KernelOnDevice kernel;
    int threads, shared_bytes, cluster;

    bool operator<(const Launch& other) const {
      return std::tie(kernel, threads, shared_bytes, cluster) <
             std::tie(other.kernel, other.threads, other.shared_bytes, other.cluster);
    }
  };
  static thread_local std::map<Launch, int> kept;
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    const Launch launch{{reinterpret_cast<const void*>(kernel), device}, threads, shared_bytes, cluster};
    if (const auto known = kept.find(launch); known != kept.end()) return known->second;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = cluster_config(cluster, threads, shared_bytes, cluster, nullptr, attribute);
    error = allow_shared_bytes(kernel, shared_bytes);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error == cudaSuccess) return kept[launch] = clusters;
  }
  cudaGetLastError();
  return 0;
}

}  // namespace ssm_kernels::cuda
