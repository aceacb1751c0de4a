// Named barriers: barriers among some of a block's warps, by number. __syncthreads is number 0.
#pragma once

namespace ssm_kernels::cuda {

// Waits until `threads` threads of the block, in whole warps, have arrived at barrier `number`. Their earlier writes to memory
// are then visible. (barrier.sync, not bar.sync, which is barrier.sync.aligned: compute-sanitizer reports calls at several
// places of a kernel, from warps with different roles, as divergence.)
__device__ __forceinline__ void barrier_sync(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at barrier `number` without waiting.
__device__ __forceinline__ void barrier_arrive(int number, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace ssm_kernels::cuda
