// Copies from global to shared memory that bypass registers (cp.async, compute capability 8.0 and newer).
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

constexpr int kCpAsyncBytes = 16;

// Starts a copy of kCpAsyncBytes, of which only the first `valid_bytes` are read; the rest are zeros. Both addresses are
// multiples of kCpAsyncBytes; with no valid bytes the source is not read.
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid_bytes) {
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(valid_bytes) : "memory");
}

// Starts a copy of 4 or 8 bytes through the L1 cache, or of 16 bytes that bypasses it. Addresses are multiples of `bytes`.
template <int bytes>
__device__ __forceinline__ void cp_async(uint32_t target, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == kCpAsyncBytes, "cp.async has no other sizes");
  if constexpr (bytes == kCpAsyncBytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global), "n"(bytes) : "memory");
  }
}
template <int bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global) {
  cp_async<bytes>(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), global);
}

// Starts a copy of 4 or 8 bytes, of which only the first `valid_bytes` are read; the rest are zeros.
template <int bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid_bytes) {
  static_assert(bytes == 4 || bytes == 8, "16 bytes have a function of their own, which bypasses the L1 cache");
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global), "n"(bytes), "r"(valid_bytes)
               : "memory");
}

// Waits for every copy that this thread has started.
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Commits the copies that this thread has started since the last commit, as a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's groups except the last `pending`.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace ssm_kernels::cuda
