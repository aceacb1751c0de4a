// TMA for tensors of five dimensions (tma.cuh).
#pragma once

#include "cuda/ptx/tma.cuh"

namespace ssm_kernels::cuda {

// tma_load_tile() for a tensor of five dimensions.
__device__ __forceinline__ void tma_load_tile(void* shared, const TmaDescriptor& map, int first, int second, int third,
                                              int fourth, int fifth, Mbarrier& barrier) {
#if __CUDA_ARCH__ >= 900
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(target),
      "l"(&map), "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(barrier.address())
      : "memory");
#endif
}

}  // namespace ssm_kernels::cuda
