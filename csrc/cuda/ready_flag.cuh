// A flag in global memory by which one block tells another that what it wrote before is there.
#pragma once

namespace ssm_kernels::cuda {

// By one thread, after a barrier with those that wrote.
__device__ __forceinline__ void raise_flag(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}

// By one thread, before a barrier, of a warp or of more, with those that read.
__device__ __forceinline__ void wait_for_flag(const int* flag) {
  int is_raised;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_raised) : "l"(flag) : "memory");
  } while (is_raised == 0);
}

}  // namespace ssm_kernels::cuda
