// TMA: copies between shared and global memory that one thread starts (cp.async.bulk, compute capability 9.0). Addresses and
// sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tma_descriptor.h"

namespace ssm_kernels::cuda {

// Copies to shared memory. An earlier arrive_and_expect_tx() made the phase of `barrier` wait for these bytes. Threads that
// wait for the barrier see the copied data.
__device__ __forceinline__ void tma_load(void* shared, const void* global, int bytes, Mbarrier& barrier) {
#if __CUDA_ARCH__ >= 900
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(global), "r"(bytes), "r"(barrier.address())
               : "memory");
#endif
}

// Copies to the L2 cache.
__device__ __forceinline__ void prefetch(const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

// The same for a tile of a tensor, at the given coordinates, innermost first. The tile begins at a multiple of 1024 bytes of
// shared memory. Elements outside of the tensor become zeros, and count as copied.
__device__ __forceinline__ void tma_load_tile(void* shared, const TmaDescriptor& map, int first, int second, int third,
                                              int fourth, Mbarrier& barrier) {
#if __CUDA_ARCH__ >= 900
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
          "r"(target),
      "l"(&map), "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(barrier.address())
      : "memory");
#endif
}

// Copies from shared memory, and commits a group. Only threads with `starts` start the copy: by a predicate, because wgmma in
// flight would delay a branch. The copy sees writes of the block's threads that they published by fence_proxy_async() before a
// barrier.
__device__ __forceinline__ void tma_store(void* global, const void* shared, int bytes, bool starts) {
#if __CUDA_ARCH__ >= 900
  const auto source = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{\n.reg .pred starts;\nsetp.ne.b32 starts, %3, 0;\n"
      "@starts cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n}" ::"l"(global),
      "r"(source), "r"(bytes), "r"(int(starts))
      : "memory");
#endif
}

// The same for a tile of a tensor, at the given coordinates, innermost first. The tile begins at a multiple of 1024 bytes of
// shared memory. Elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store_tile(const TmaDescriptor& map, int first, int second, int third, int fourth,
                                               const void* shared, bool starts) {
#if __CUDA_ARCH__ >= 900
  const auto source = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{\n.reg .pred starts;\nsetp.ne.b32 starts, %6, 0;\n"
      "@starts cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;\n}" ::"l"(&map),
      "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(source), "r"(int(starts))
      : "memory");
#endif
}

// Waits until all of this thread's groups except the last `pending` have read shared memory.
template <int pending>
__device__ __forceinline__ void tma_store_wait_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#endif
}

}  // namespace ssm_kernels::cuda
