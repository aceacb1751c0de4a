// Prefetches of memory.
#pragma once

namespace ssm_kernels::cuda {

// Fetches the line at an address of global memory into the second-level cache.
__device__ __forceinline__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

}  // namespace ssm_kernels::cuda
