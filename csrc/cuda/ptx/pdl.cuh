// Programmatic dependent launch (PDL, compute capability 9.0): a kernel starts while the previous kernel of the stream still
// runs. This hides the previous kernel's last blocks and the time between two kernels.
#pragma once

namespace ssm_kernels::cuda {

// Called by the previous kernel. The next kernel may start once every block has called this or has exited.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has finished and its writes are visible. In every block of a kernel launched with PDL at
// least one thread must call this, even if the block reads none of that data: later kernels rely on both having finished.
__device__ __forceinline__ void grid_dependency_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ssm_kernels::cuda
