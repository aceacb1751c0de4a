// Integer arithmetic of offsets.
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

__device__ __forceinline__ int64_t multiply(int64_t a, int64_t b) { return a * b; }

// One instruction. Left to itself the compiler multiplies the 64-bit value that a 32-bit one was narrowed from.
__device__ __forceinline__ int64_t multiply(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return static_cast<int64_t>(product);
}

}  // namespace ssm_kernels::cuda
