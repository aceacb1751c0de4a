// Copies of whole blocks of shared memory to global memory that one thread starts (cp.async.bulk, compute capability 9.0).
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

// A thread with `starts` starts the copy and makes a group of it, without a branch, which products under way would wait for.
// Addresses and size are multiples of 16 bytes. Of what the block's threads wrote, the copy sees what they published
// (publish_to_products) before a barrier.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes, bool starts) {
#if __CUDA_ARCH__ >= 900
  const auto source = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{\n.reg .pred starts;\nsetp.ne.b32 starts, %3, 0;\n"
      "@starts cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n}" ::"l"(global),
      "r"(source), "r"(bytes), "r"(int(starts))
      : "memory");
#endif
}

// Until shared memory has been read by all groups of this thread but the last `pending`.
template <int pending>
__device__ __forceinline__ void wait_for_bulk_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#endif
}

}  // namespace ssm_kernels::cuda
