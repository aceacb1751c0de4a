// An optimization barrier for values.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ssm_kernels::cuda {

// Returns the value of a 32-bit register unchanged, but the compiler cannot trace it: it neither moves computations that depend
// on the result across this point nor keeps them in registers for a later use of the same value.
template <typename T>
__device__ __forceinline__ T opaque(T value) {
  static_assert(sizeof(T) == 4, "the value is one 32-bit register");
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// An address in shared memory as a number of 32 bits, for Vector::load_shared and store_shared.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
// The compiler computes such addresses again at each use, from the block's base on, unless they are opaque.
__device__ __forceinline__ uint32_t opaque_shared_address(const void* shared) { return opaque(shared_address(shared)); }

}  // namespace ssm_kernels::cuda
