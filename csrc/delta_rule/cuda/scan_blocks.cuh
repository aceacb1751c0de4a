// The blocks of the kernels that go over a sequence's chunks: two consumer warpgroups, each with 64 rows of a state in
// registers, and last a producer warpgroup, of which one thread starts TMA loads. Some have a matrix warpgroup between these,
// and producers that are more than one thread.
//
// `Scan`, the kernel's struct, has init(), run by all threads, which initializes the barriers; produce(); consume(warpgroup);
// and make_matrices() if kHasMatrixWarpgroup.
#pragma once

#include "cuda/chunked/scheduler.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "delta_rule/cuda/segment_maps.cuh"
#include "delta_rule/cuda/toolkit.cuh"

namespace ssm_kernels::delta_rule {

__device__ __forceinline__ int warpgroup_of_thread() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}

template <typename Scan>
constexpr bool kHasMatrixWarpgroup = false;

template <typename Scan>
__device__ __forceinline__ void run_warpgroups(Scan& scan, int warpgroup) {
  if (kHasMatrixWarpgroup<Scan> ? warpgroup > kWarpgroups : warpgroup == kWarpgroups) {
    cuda::warpgroup_reg_dealloc<Scan::kProducerRegisters>();
    if (kHasMatrixWarpgroup<Scan> || threadIdx.x % kWarpgroupThreads == 0) scan.produce();
    return;
  }
  if constexpr (kHasMatrixWarpgroup<Scan>) {
    if (warpgroup == kWarpgroups) {
      cuda::warpgroup_reg_dealloc<Scan::kMatrixRegisters>();
      scan.make_matrices();
      return;
    }
  }
  cuda::warpgroup_reg_alloc<Scan::kConsumerRegisters>();
  scan.consume(warpgroup);
}

// Forward's scan: a block takes the range of chunks that the schedule has for it.
template <typename Scan, typename Params>
__device__ __forceinline__ void run_scan(const Unpacked<Params>& p, const Schedule& schedule) {
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename Scan::Shared>(unaligned_memory);
  if constexpr (Scan::kIsOfMaps) {
    const Params& params = p;
    const WorkSpan at(params, schedule, static_cast<int>(blockIdx.x));
    if (is_unread_map(params, at.entry, StateTile(params, schedule, at, 0).first_row, /*is_reverse=*/false)) {
      cuda::grid_dependency_sync();  // each block of a kernel that may begin before the previous one ends
      return;
    }
  }
  Scan scan{p, p, schedule, shared};
  const int warpgroup = warpgroup_of_thread();
  scan.init();
  take_range(schedule);
  __syncthreads();
  run_warpgroups(scan, warpgroup);
}

// Backward's states. Blocks go forward in time, one for each work tile, and as many others backward.
template <typename States, typename Params>
__device__ __forceinline__ void run_states(const Params& p, const WorkPartition& partition) {
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename States::Shared>(unaligned_memory);
  const unsigned work_tiles = static_cast<unsigned>(partition.work_tiles);
  const WorkSpan at(p, partition, static_cast<int>(blockIdx.x % work_tiles));
  const bool is_reverse = blockIdx.x >= work_tiles;
  if (is_unread_map(p, at.entry, StateTile(p, partition, at, 0).first_row, is_reverse)) {
    cuda::grid_dependency_sync();
    return;
  }
  States states{p, partition, shared, at, is_reverse};
  states.init();
  __syncthreads();
  run_warpgroups(states, warpgroup_of_thread());
}

}  // namespace ssm_kernels::delta_rule
