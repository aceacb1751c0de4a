// The kernel before forward's for packed sequences: a prefix sum over their numbers of chunks, which the host does not know.
#pragma once

#include "cuda/chunked/span.cuh"
#include "cuda/constants.h"

namespace ssm_kernels::cuda::chunked {

constexpr int kChunkStartsThreads = 1024;

// Run by one block: writes Schedule::chunk_starts, each thread for some neighboring sequences. Clears the flags and the ticket
// counter.
template <typename Params>
__global__ void __launch_bounds__(kChunkStartsThreads)
    chunk_starts_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule schedule) {
  constexpr int kWarps = kChunkStartsThreads / kWarpSize;
  __shared__ int64_t warp_sums[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int64_t i = threadIdx.x; i < schedule.blocks * kWarpgroups; i += kChunkStartsThreads) schedule.ready[i] = 0;
  if (threadIdx.x == 0) *schedule.ticket_counter = 0;

  // An upper bound for valid cu_seqlens: during the capture of a graph nobody checks them.
  const int64_t most = max_packed_chunks(p.seqlen, p.batch);
  const int64_t count = (p.batch + kChunkStartsThreads - 1) / kChunkStartsThreads;
  const int64_t first = min(threadIdx.x * count, p.batch), end = min(first + count, p.batch);
  const auto chunks_of = [&](int64_t entry) { return max(1, ChunkSpan(p, entry).chunks); };
  int64_t own = 0;
  for (int64_t entry = first; entry < end; ++entry) own += chunks_of(entry);
  const auto sum_of_earlier_lanes = [&](int64_t value) {
    int64_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += earlier;
    }
    return sum - value;
  };
  int64_t before = sum_of_earlier_lanes(own);
  if (lane == kWarpSize - 1) warp_sums[warp] = before + own;
  __syncthreads();
  static_assert(kWarps == kWarpSize, "each lane of a warp reads the sum of one warp");
  before += __shfl_sync(kAllLanes, sum_of_earlier_lanes(warp_sums[lane]), warp);
  if (threadIdx.x == 0) schedule.chunk_starts[0] = 0;
  for (int64_t entry = first; entry < end; ++entry) {
    before += chunks_of(entry);
    schedule.chunk_starts[entry + 1] = static_cast<int>(min(before, most));
  }
}

}  // namespace ssm_kernels::cuda::chunked
