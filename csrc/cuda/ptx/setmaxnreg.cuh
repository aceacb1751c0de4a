// Moves registers from producer to consumer warpgroups (setmaxnreg, compute capability 9.0a).
#pragma once

namespace ssm_kernels::cuda {

// Registers per producer thread such that each consumer thread can have consumer_registers. setmaxnreg only redistributes the
// registers that a block starts with; asking for more deadlocks.
template <int consumer_threads, int consumer_registers, int producer_threads, int blocks_per_multiprocessor = 1>
constexpr int producer_registers() {
  constexpr int kRegistersPerMultiprocessor = 65536, kThreads = consumer_threads + producer_threads;
  constexpr int kAtStart = kRegistersPerMultiprocessor / blocks_per_multiprocessor / kThreads / 8 * 8 * kThreads;
  return (kAtStart - consumer_threads * consumer_registers) / producer_threads / 8 * 8;
}

// Called by all four warps of a warpgroup: their threads then have `count` registers each, a multiple of eight. dealloc
// releases registers; alloc waits until enough are free. Other devices ignore both.
template <int count>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "registers are counted in eights, from 24 to 256");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
#endif
}
template <int count>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "registers are counted in eights, from 24 to 256");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
#endif
}

}  // namespace ssm_kernels::cuda
