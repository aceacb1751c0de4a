// Registers handed from some warps of a block to others, which compute capability 9.0 lets groups of four warps do.
#pragma once

namespace ssm_kernels::cuda {

// What `leaving` threads of a block may keep, for `taking` others to have `taken` each: all together have what they began with,
// which is what the compiler may give them, and who asked for more would wait for ever.
template <int taking, int taken, int leaving, int blocks_of_multiprocessor = 1>
constexpr int producer_registers() {
  constexpr int kOfMultiprocessor = 65536, kThreads = taking + leaving;
  constexpr int kAtFirst = kOfMultiprocessor / blocks_of_multiprocessor / kThreads / 8 * 8 * kThreads;
  return (kAtFirst - taking * taken) / leaving / 8 * 8;
}

// By each of four warps that begin at a multiple of four: from here on their threads have `count` registers, a multiple of
// eight. Fewer than before are free for warps that ask for more; these wait until there are enough. Nothing happens
// on other devices.
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
