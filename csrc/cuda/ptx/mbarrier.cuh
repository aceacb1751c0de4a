// A barrier in shared memory that threads arrive at and, later, wait for.
#pragma once

#include <cstdint>

namespace ssm_kernels::cuda {

class Mbarrier {
 public:
  // By one thread, before all threads of the block meet; `threads` arrivals make a phase.
  __device__ __forceinline__ void init(int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(threads) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(address()) : "memory");
  }
  // The phase then also waits for that many bytes of bulk loads.
  __device__ __forceinline__ void arrive_and_expect_tx(int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.expect_tx.shared.b64 phase, [%0], %1;\n}" ::"r"(address()), "r"(bytes)
                 : "memory");
#endif
  }
  // Until the phase of that number is over; it is the one under way, or the one before. Where the device can, the thread sleeps
  // meanwhile: looking again and again takes the other warps' issue slots.
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

  __device__ __forceinline__ uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(&state_)); }

 private:
  uint64_t state_;
};

}  // namespace ssm_kernels::cuda
