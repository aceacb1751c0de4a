// Products of whole tiles in backward's kernels, which are written for either kind: those of compute capability 9.0a, which run
// while their warps go on, and those of a warp. The kernels call cuda::multiply with operands that describe() makes.
#pragma once

#include "cuda/shared_barrier.cuh"
#include "cuda/warp_products.cuh"
#include "cuda/wgmma.cuh"
#include "ssd/ssd_fragments.cuh"

namespace ssm_kernels::ssd {

struct WgmmaProducts {
  static constexpr bool kIsAsync = true;
  static constexpr int kAlignment = kOperandAlignment;  // of tiles
  static constexpr bool kAreCompiled = SSM_KERNELS_HAS_WGMMA;

  template <int columns>
  static __device__ __forceinline__ uint64_t describe(const Tile<columns>& tile, const Lane&) {
    return ssd::describe(tile);
  }
  template <typename Place>
  static __device__ __forceinline__ const Place& anew(const Place& place) {
    return place;
  }
  static __device__ __forceinline__ void fence() { cuda::fence_products(); }
  static __device__ __forceinline__ void commit() { cuda::commit_products(); }
  static __device__ __forceinline__ void publish() { cuda::publish_to_products(); }
  template <int pending, int blocks>
  static __device__ __forceinline__ void wait(float (&d)[blocks][4]) {
    cuda::wait_for_products<pending>(d);
  }
};

struct WarpProducts {
  static constexpr bool kIsAsync = false;
  static constexpr int kAlignment = 128;
  static constexpr bool kAreCompiled = true;

  template <int columns, int element_bytes>
  static __device__ __forceinline__ cuda::WarpOperand<element_bytes> describe(const Tile<columns, element_bytes>& tile,
                                                                              const Lane& lane) {
    return cuda::describe_warp_operand<element_bytes>(&tile, Tile<columns, element_bytes>::kPartBytes, lane.anew().index);
  }
  // Registers are few: addresses of one use are not kept for the next.
  template <typename Place>
  static __device__ __forceinline__ Place anew(const Place& place) {
    return place.anew();
  }
  static __device__ __forceinline__ void fence() {}
  static __device__ __forceinline__ void commit() {}
  static __device__ __forceinline__ void publish() {}
  template <int pending, int blocks>
  static __device__ __forceinline__ void wait(float (&)[blocks][4]) {}
};

// A block's shared memory: what it has once, then as many stages as there is room for.
template <typename Once, typename Stage_, typename Products, int max_stages>
struct StagedShared : Once {
  using Stage = Stage_;
  static constexpr int kMaxStages = max_stages;
  static __device__ __forceinline__ int stages(const SsdBwdParams& p) { return Products::kIsAsync ? kMaxStages : p.stages; }
  cuda::SharedBarrier full[max_stages], empty[max_stages];

  __device__ __forceinline__ Stage& stage(int index) {
    return *reinterpret_cast<Stage*>(reinterpret_cast<unsigned char*>(this) + align(sizeof(*this)) + index * kStageBytes);
  }
  static constexpr int bytes(int stages) { return Products::kAlignment + align(sizeof(StagedShared)) + stages * kStageBytes; }
  static __device__ __forceinline__ StagedShared& at(unsigned char* memory) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    return *reinterpret_cast<StagedShared*>(memory + align(address) - address);
  }

 private:
  static constexpr int align(size_t bytes) {
    return static_cast<int>((bytes + Products::kAlignment - 1) / Products::kAlignment * Products::kAlignment);
  }
  static constexpr int kStageBytes = align(sizeof(Stage));
};

}  // namespace ssm_kernels::ssd
