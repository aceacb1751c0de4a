// Limits of a device, and the state of the current stream.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

namespace ssm_kernels::cuda {

// ATen queries each device once and keeps the answer.
inline const cudaDeviceProp& device_properties(int device) {
  return *at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
}

inline int multiprocessor_count(int device) { return device_properties(device).multiProcessorCount; }

// The limit for a block whose kernel has opted in to more shared memory than the default.
inline int max_shared_bytes(int device) { return static_cast<int>(device_properties(device).sharedMemPerBlockOptin); }

inline bool is_capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

}  // namespace ssm_kernels::cuda
