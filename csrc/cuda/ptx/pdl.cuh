// Kernels that begin while the one before them in the stream still runs (programmatic dependent launch, compute capability
// 9.0): its last blocks, and what the device does between two kernels, cost no time then.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ssm_kernels::cuda {

// By threads of the kernel before. When each of its blocks has come here or has ended, the next may begin.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before has ended and what it wrote is seen. Each block of a kernel that was launched so has a thread that
// comes here, also if it reads nothing of that: kernels after it rely on both having ended.
__device__ __forceinline__ void grid_dependency_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches the kernel; where `uses_pdl`, it may begin before the one that was launched before it has ended. Both then
// are of compute capability 9.0.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, bool uses_pdl,
                   const Params&... params) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = uses_pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace ssm_kernels::cuda
