// Sums over the lanes, warps or blocks of a team, which has a group of columns.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/ptx/cluster.cuh"
#include "norm/cuda/launch.h"

namespace ssm_kernels::norm {

constexpr int kMaxWarps = 32;

// Sums `count` values over a team that is a cluster of blocks; all lanes of all blocks get the same bits. Buffers alternate as
// those of TeamSum do.
template <int count>
class ClusterSum {
 public:
  using Shared = float[2][count][cuda::kMaxClusterBlocks * kMaxWarps];

  static __device__ __forceinline__ void add(Shared& shared, float (&values)[count], int buffer, int blocks, int warps) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, own = cuda::cluster_rank() * warps + warp;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      values[i] = cuda::sum_over_warp(values[i]);
      if (lane < blocks) cuda::store_cluster(&shared[buffer][i][own], lane, values[i]);
    }
    cuda::cluster_barrier();
#pragma unroll
    for (int i = 0; i < count; ++i) {
      values[i] = 0;
      for (int k = lane; k < blocks * warps; k += kWarpSize) values[i] += shared[buffer][i][k];
      values[i] = cuda::sum_over_warp(values[i]);
    }
  }
};

// Sums `count` values over each team; all lanes get the same bits. All threads of the block call it together. Consecutive calls
// use different buffers: the barrier of the call between two uses of a buffer separates its reads from its next writes.
template <typename Acc, int count>
class TeamSum {
 public:
  static constexpr int kBuffers = 3;
  using Shared = Acc[kBuffers][count][kMaxWarps];

  __device__ __forceinline__ TeamSum(Shared& shared, int lanes) : shared_(shared), lanes_(lanes) {}

  __device__ __forceinline__ void operator()(Acc (&values)[count], int buffer) {
    for (int distance = min(lanes_, kWarpSize) / 2; distance > 0; distance /= 2) add_across(values, distance);
    if (lanes_ <= kWarpSize) return;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (lane == 0) shared_[buffer][i][warp] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = lane < lanes_ / kWarpSize ? shared_[buffer][i][lane] : Acc(0);
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) add_across(values, distance);
  }

 private:
  static __device__ __forceinline__ void add_across(Acc (&values)[count], int distance) {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] += __shfl_xor_sync(kAllLanes, values[i], distance);
  }

  Shared& shared_;
  int lanes_;
};

}  // namespace ssm_kernels::norm
