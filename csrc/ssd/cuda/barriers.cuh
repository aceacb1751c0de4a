// The named barriers of a block whose consumer warpgroups hold a state tile each.
#pragma once

#include "cuda/ptx/named_barrier.cuh"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

// __syncthreads() is barrier 0.
enum NamedBarrier : int {
  kWarpgroupBarrier = 1,  // and the next ones, one for each warpgroup
  kPartialOutIsThere = kWarpgroupBarrier + kWarpgroups,
  kPartialOutIsRead,
};
__device__ __forceinline__ void sync_warpgroup(int index) { cuda::barrier_sync(kWarpgroupBarrier + index, kWarpgroupThreads); }

}  // namespace ssm_kernels::ssd
