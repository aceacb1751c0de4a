// The layout of a block's two consumer warpgroups in forward.
//
// With dstate over kStateColumns both warpgroups have the same rows of one head, and half of the columns of its state each. y
// is a sum over columns, both in S C and in the C_i . B_j of M. Each warpgroup therefore computes a part of y. The second
// passes its part through shared memory to the first, which adds it and writes out.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/smem_tile.cuh"

namespace ssm_kernels::cuda::chunked {

// A part of y^T on its way from one warpgroup of the block to the other, in the order of the threads' registers.
class PartialOut {
 public:
  __device__ __forceinline__ void put(const float (&y)[kStepBlocks][4]) {
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) values_[n][threadIdx.x % kWarpgroupThreads] = {y[n][0], y[n][1], y[n][2], y[n][3]};
    barrier_arrive(kPartialOutIsThere, kWarpgroups * kWarpgroupThreads);
  }
  __device__ __forceinline__ void add_to(float (&y)[kStepBlocks][4]) const {
    barrier_sync(kPartialOutIsThere, kWarpgroups * kWarpgroupThreads);
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
      const float4 part = values_[n][threadIdx.x % kWarpgroupThreads];
      y[n][0] += part.x;
      y[n][1] += part.y;
      y[n][2] += part.z;
      y[n][3] += part.w;
    }
    barrier_arrive(kPartialOutIsRead, kWarpgroups * kWarpgroupThreads);
  }
  // Called by the warpgroup that called put(), once for each part, before the next put().
  __device__ __forceinline__ void wait_until_read() const { barrier_sync(kPartialOutIsRead, kWarpgroups * kWarpgroupThreads); }

 private:
  float4 values_[kStepBlocks][kWarpgroupThreads];
};

// How the warpgroups of a block divide rows and columns of states with `dstate` columns.
template <int dstate>
struct WarpgroupLayout {
  static constexpr int kColumns = static_cast<int>(tile_columns(dstate)), kColumnBlocks = column_blocks(dstate);
  static constexpr int kRowBlocks = kWarpgroups / kColumnBlocks;
  static constexpr bool kShareRows = kRowBlocks == 1;

  using PartialOut = std::conditional_t<kShareRows, chunked::PartialOut, Empty>;

  static __device__ __forceinline__ int column_block(int index) { return kShareRows ? index : 0; }
  static __device__ __forceinline__ int row_block(int index) { return kShareRows ? 0 : index; }
  // One of the warpgroups with the same rows writes out.
  static __device__ __forceinline__ bool writes_out(int index) { return column_block(index) == 0; }
};

}  // namespace ssm_kernels::cuda::chunked
