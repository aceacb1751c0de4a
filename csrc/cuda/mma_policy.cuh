// MMA policies: matrix products of whole tiles by wgmma, which run while their warps continue (Sm90Wgmma), or by mma.sync,
// which are complete on return (Sm80Mma; Sm80Tf32 where TF32 is allowed). Kernels written for either call cuda::gemm with
// operands that describe() makes.
#pragma once

#include "cuda/fragment.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/warp_mma.cuh"

namespace ssm_kernels::cuda {

struct Sm90Wgmma {
  static constexpr bool kIsAsync = true;
  static constexpr int kAlignment = kOperandAlignment;  // of tiles, in bytes
  static constexpr bool kAreCompiled = SSM_KERNELS_HAS_WGMMA;

  template <int columns>
  static __device__ __forceinline__ uint64_t describe(const SmemTile<columns>& tile, const FragmentLane&) {
    return make_operand(tile);
  }
  template <typename Value>
  static __device__ __forceinline__ const Value& opaque(const Value& value) {
    return value;
  }
  static __device__ __forceinline__ void fence() { warpgroup_arrive(); }
  static __device__ __forceinline__ void commit() { warpgroup_commit(); }
  static __device__ __forceinline__ void publish() { fence_proxy_async(); }
  template <int pending, int blocks>
  static __device__ __forceinline__ void wait(float (&d)[blocks][4]) {
    warpgroup_wait<pending>(d);
  }
};

struct Sm80Mma {
  static constexpr bool kIsAsync = false;
  static constexpr bool kIsRounded = false;  // whether fp32 operands are rounded to TF32, instead of split
  static constexpr int kAlignment = 128;
  static constexpr bool kAreCompiled = true;

  template <int columns, int element_bytes>
  static __device__ __forceinline__ WarpOperand<element_bytes> describe(const SmemTile<columns, element_bytes>& tile,
                                                                        const FragmentLane& lane) {
    return make_warp_operand<element_bytes>(&tile, SmemTile<columns, element_bytes>::kPanelBytes, lane.opaque().index);
  }
  // Registers are few: the compiler recomputes addresses at each use instead of keeping them.
  template <typename Value>
  static __device__ __forceinline__ Value opaque(const Value& value) {
    return value.opaque();
  }
  static __device__ __forceinline__ void fence() {}
  static __device__ __forceinline__ void commit() {}
  static __device__ __forceinline__ void publish() {}
  template <int pending, int blocks>
  static __device__ __forceinline__ void wait(float (&)[blocks][4]) {}
};

// Sm80Mma for fp32 operands that are rounded to TF32.
struct Sm80Tf32 : Sm80Mma {
  static constexpr bool kIsRounded = true;

  template <int columns>
  static __device__ __forceinline__ WarpOperand<4, true> describe(const SmemTile<columns, 4>& tile, const FragmentLane& lane) {
    return make_warp_operand<4, true>(&tile, SmemTile<columns, 4>::kPanelBytes, lane.opaque().index);
  }
};

}  // namespace ssm_kernels::cuda
