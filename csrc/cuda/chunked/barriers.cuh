// The named barriers of a block whose consumer warpgroups hold a state tile each.
#pragma once

#include "cuda/chunked/geometry.h"
#include "cuda/constants.h"
#include "cuda/ptx/named_barrier.cuh"

namespace ssm_kernels::cuda::chunked {

// __syncthreads() is barrier 0.
enum NamedBarrier : int {
  kWarpgroupBarrier = 1,  // and the next ones, one for each warpgroup
  kPartialOutIsThere = kWarpgroupBarrier + kWarpgroups,
  kPartialOutIsRead,
  kRotationBarrier,  // of the warpgroup that rotates rows
};
__device__ __forceinline__ void sync_warpgroup(int index) { barrier_sync(kWarpgroupBarrier + index, kWarpgroupThreads); }

}  // namespace ssm_kernels::cuda::chunked
