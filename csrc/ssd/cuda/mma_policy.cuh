// Products of whole tiles in backward's kernels, which are written for either kind: those of compute capability 9.0a, which run
// while their warps go on, and those of a warp. The kernels call cuda::gemm with operands that describe() makes.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/warp_mma.cuh"
#include "ssd/cuda/state.cuh"

namespace ssm_kernels::ssd {

struct Sm90Wgmma {
  static constexpr bool kIsAsync = true;
  static constexpr int kAlignment = kOperandAlignment;  // of tiles
  static constexpr bool kAreCompiled = SSM_KERNELS_HAS_WGMMA;

  template <int columns>
  static __device__ __forceinline__ uint64_t describe(const SmemTile<columns>& tile, const FragmentLane&) {
    return ssd::describe(tile);
  }
  template <typename Value>
  static __device__ __forceinline__ const Value& opaque(const Value& value) {
    return value;
  }
  static __device__ __forceinline__ void fence() { cuda::warpgroup_arrive(); }
  static __device__ __forceinline__ void commit() { cuda::warpgroup_commit(); }
  static __device__ __forceinline__ void publish() { cuda::fence_proxy_async(); }
  template <int pending, int blocks>
  static __device__ __forceinline__ void wait(float (&d)[blocks][4]) {
    cuda::warpgroup_wait<pending>(d);
  }
};

struct Sm80Mma {
  static constexpr bool kIsAsync = false;
  static constexpr int kAlignment = 128;
  static constexpr bool kAreCompiled = true;

  template <int columns, int element_bytes>
  static __device__ __forceinline__ cuda::WarpOperand<element_bytes> describe(const SmemTile<columns, element_bytes>& tile,
                                                                              const FragmentLane& lane) {
    return cuda::make_warp_operand<element_bytes>(&tile, SmemTile<columns, element_bytes>::kPanelBytes, lane.opaque().index);
  }
  // Registers are few: addresses of one use are not kept for the next.
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

// A block's shared memory: what it has once, then as many stages as there is room for.
template <typename Once, typename Stage_, typename Mma, int max_stages>
struct StagedShared : Once {
  using Stage = Stage_;
  static constexpr int kMaxStages = max_stages;
  static __device__ __forceinline__ int stages(const SsdBwdParams& p) { return Mma::kIsAsync ? kMaxStages : p.stages; }
  cuda::Mbarrier full[max_stages], empty[max_stages];

  __device__ __forceinline__ Stage& stage(int index) {
    return *reinterpret_cast<Stage*>(reinterpret_cast<unsigned char*>(this) + align(sizeof(*this)) + index * kStageBytes);
  }
  static constexpr int bytes(int stages) { return Mma::kAlignment + align(sizeof(StagedShared)) + stages * kStageBytes; }
  static __device__ __forceinline__ StagedShared& at(unsigned char* memory) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    return *reinterpret_cast<StagedShared*>(memory + align(address) - address);
  }

 private:
  static constexpr int align(size_t bytes) {
    return static_cast<int>((bytes + Mma::kAlignment - 1) / Mma::kAlignment * Mma::kAlignment);
  }
  static constexpr int kStageBytes = align(sizeof(Stage));
};

}  // namespace ssm_kernels::ssd
