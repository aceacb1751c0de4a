// A flag in global memory. One block raises it to tell another that its earlier writes are visible.
#pragma once

namespace ssm_kernels::cuda {

// Called by one thread after a barrier with the threads that wrote.
__device__ __forceinline__ void raise_flag(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}

// Called by one thread before a barrier, of a warp or more, with the threads that read.
__device__ __forceinline__ void wait_for_flag(const int* flag) {
  int is_raised;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_raised) : "l"(flag) : "memory");
  } while (is_raised == 0);
}

}  // namespace ssm_kernels::cuda
