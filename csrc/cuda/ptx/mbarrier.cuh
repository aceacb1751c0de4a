// An mbarrier: a barrier in shared memory at which threads arrive and for which they wait later.
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

class Mbarrier {
 public:
  // Called by one thread, before a __syncthreads(). A phase completes after `threads` arrivals.
  __device__ __forceinline__ void init(int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(threads) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(address()) : "memory");
  }
  // Arrives in threads with `arrives`: by a predicate, because wgmma in flight would delay a branch.
  __device__ __forceinline__ void arrive_if(bool arrives) {
    asm volatile(
        "{\n.reg .b64 phase;\n.reg .pred arrives;\nsetp.ne.b32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(address()),
        "r"(int(arrives))
        : "memory");
  }
  // Arrives; the phase also waits until TMA loads have written `bytes` bytes.
  __device__ __forceinline__ void arrive_and_expect_tx(int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.expect_tx.shared.b64 phase, [%0], %1;\n}" ::"r"(address()), "r"(bytes)
                 : "memory");
#endif
  }
  // Waits until phase `phase` has completed: the current one or the one before. From compute capability 9.0 on the thread
  // sleeps meanwhile, because polling takes issue slots from the other warps.
  __device__ __forceinline__ void wait(int phase) {
#if __CUDA_ARCH__ >= 900
#define SSM_BARRIER_WAIT "mbarrier.try_wait"
#else
#define SSM_BARRIER_WAIT "mbarrier.test_wait"
#endif
    asm volatile("{\n.reg .pred over;\nagain:\n" SSM_BARRIER_WAIT
                 ".parity.shared.b64 over, [%0], %1;\n@!over bra again;\n}" ::"r"(address()),
                 "r"(phase & 1)
                 : "memory");
#undef SSM_BARRIER_WAIT
  }

  // Whether that phase has completed, without waiting.
  __device__ __forceinline__ bool is_complete(int phase) const {
    uint32_t is_over = 0;
    asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
                 : "=r"(is_over)
                 : "r"(address()), "r"(phase & 1)
                 : "memory");
    return is_over != 0;
  }

  __device__ __forceinline__ uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(&state_)); }

 private:
  uint64_t state_;
};

}  // namespace ssm_kernels::cuda
