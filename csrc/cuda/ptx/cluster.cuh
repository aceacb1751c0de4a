// Thread block clusters: blocks that are resident together and write to each other's shared memory (compute capability 9.0 and
// newer). On older devices no kernel is launched with clusters, and the functions do nothing.
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

// Waits for all threads of the cluster; what they wrote to shared memory before is visible afterwards.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The rank of the block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The address at which block `rank` of the cluster has its copy of `shared`.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, int rank) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

// Stores a value in the shared memory of block `rank` of the cluster, where that block has its copy of `shared`.
__device__ __forceinline__ void store_cluster(float* shared, int rank, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(shared, rank)), "f"(value) : "memory");
#endif
}

// Adds to a number in shared memory of the cluster, whose address cluster_address() returned.
__device__ __forceinline__ void add_cluster(uint32_t address, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

}  // namespace ssm_kernels::cuda
