// Integer arithmetic for offsets.
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

__device__ __forceinline__ int64_t widening_multiply(int64_t a, int64_t b) { return a * b; }

// One instruction. Without the assembly the compiler multiplies the 64-bit values that the arguments were narrowed from.
__device__ __forceinline__ int64_t widening_multiply(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return static_cast<int64_t>(product);
}

// base + a * b bytes in one instruction, for the same reason.
template <typename Byte>
__device__ __forceinline__ Byte* add_product(Byte* base, int a, int b) {
  static_assert(sizeof(Byte) == 1, "a * b is an offset in bytes");
#ifdef __CUDA_ARCH__
  Byte* address;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(a), "r"(b), "l"(base));
  return address;
#else
  return base + static_cast<int64_t>(a) * b;
#endif
}

}  // namespace ssm_kernels::cuda
