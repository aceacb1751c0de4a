// The carry: how blocks that scan consecutive parts (tiles or segments) of a sequence pass a state from one to the next.
//
// A part acts on the state as an affine map h -> decay h + offset. Blocks get the state before their part by look-back, from an
// earlier kernel, or by both:
//
//   By look-back in one kernel. A block publishes the state after its part, and the block of the next part waits for it. CUDA
//   promises no order of blocks, so blocks take their parts by tickets, in order: the part that a block waits for has been
//   taken, and its block waits only for earlier ones. A few words are published with a tag in each (TaggedWords), so neither
//   fences nor flags are needed; a larger state is published by a flag, which one thread raises and one thread of each warp
//   reads. linear_scan does the former, ssd's forward the latter for short work tiles.
//
//   By an earlier kernel, where one part after another would take too long: it computes the map of each part, and a block folds
//   the maps of all parts before its own, in order. selective_scan's carry pass and ssd's state passing do so. With few
//   chains linear_scan publishes the maps of its tiles too, in the same kernel.
//
// Parts are folded in their order, so results have the same bits every time.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/math.h"

namespace ssm_kernels::cuda {

// h -> decay h + offset, or h -> offset if a sequence begins in the part (a reset; a product with zero would let another
// sequence's NaN through). A state of zero gives the offset too, because the decay of a whole part may have overflowed. (Other
// states are right as long as every product of consecutive decays is finite.)
template <typename Acc>
struct AffineMap {
  Acc decay = 1, offset = 0;

  __device__ __forceinline__ Acc operator()(Acc h, bool is_reset = false) const {
    return is_reset || h == Acc(0) ? offset : Math<Acc>::fma(decay, h, offset);
  }
  // The composition: `first`, then this map.
  __device__ __forceinline__ AffineMap after(const AffineMap& first, bool is_reset) const {
    return is_reset ? *this : AffineMap{decay * first.decay, (*this)(first.offset)};
  }
};

// The number of the next part that no block has taken. Called by one thread of a block. The counter is zero before the kernel.
template <typename Count>
__device__ __forceinline__ Count take_ticket(Count* counter) {
  return atomicAdd(counter, Count(1));
}

// Says that the block's earlier writes are visible. Called by one thread after a barrier with the threads that wrote.
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

// A value in 64-bit words: 32 bits of the value beside a nonzero tag. The words are zero before the kernel.
template <typename Acc>
struct TaggedWords {
  static constexpr int kWords = sizeof(Acc) / sizeof(uint32_t);
  static_assert(kWords == 1 || kWords == 2, "a value is cut into words of 32 bits");

  static __device__ __forceinline__ void publish(uint64_t* address, Acc value, uint32_t tag) {
    uint32_t halves[kWords];
    memcpy(halves, &value, sizeof(Acc));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint64_t word = static_cast<uint64_t>(tag) << 32 | halves[i];
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address + i), "l"(word) : "memory");
    }
  }

  // Reads once; is_published() says whether all words were there.
  uint64_t words[kWords];
  __device__ __forceinline__ void read(const uint64_t* address) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(address + i) : "memory");
    }
  }
  __device__ __forceinline__ bool is_published() const {
    bool result = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result &= (words[i] >> 32) != 0;
    return result;
  }
  __device__ __forceinline__ uint32_t tag() const { return static_cast<uint32_t>(words[0] >> 32); }
  __device__ __forceinline__ Acc value() const {
    uint32_t halves[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) halves[i] = static_cast<uint32_t>(words[i]);
    Acc result;
    memcpy(&result, halves, sizeof(Acc));
    return result;
  }
};

}  // namespace ssm_kernels::cuda
