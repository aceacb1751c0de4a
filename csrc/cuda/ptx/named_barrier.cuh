// Barriers among some of a block's warps, by number; __syncthreads is number 0.
#pragma once

namespace ssm_kernels::cuda {

// Waits until `threads` threads of the block, in whole warps, have called this with that number. What they wrote to memory
// before is then seen. (Not bar.sync, which is barrier.sync.aligned: compute-sanitizer holds calls at several places of a
// kernel, as of warps with different roles, for divergence.)
__device__ __forceinline__ void barrier_sync(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Lets others pass that wait there, without waiting itself.
__device__ __forceinline__ void barrier_arrive(int number, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace ssm_kernels::cuda
