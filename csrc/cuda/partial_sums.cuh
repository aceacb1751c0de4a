// The second stage of sums over blocks: adds rows of partial sums, which the blocks of another kernel have written, in a fixed
// order.
//
//   total[c] = sum over r of partials[r][c]
//
// A block takes `columns` neighboring columns; `rows` threads per column each add every rows-th row, `loads` at a time. The
// lanes of a warp that share a column then add their sums by shuffles, and the first warp adds those of all warps. Few columns
// per block make enough blocks to fill the device; at least eight make whole 32-byte sectors of float32.
#pragma once

#include <cstdint>

#include "cuda/constants.h"

namespace ssm_kernels::cuda {

template <int columns, int rows, int loads>
struct PartialSums {
  static constexpr int kThreads = columns * rows, kWarps = kThreads / kWarpSize;
  static_assert(kWarpSize % columns == 0, "the first warp adds the sums of all warps");

  static int64_t blocks(int64_t count) { return (count + columns - 1) / columns; }

  // Adds `height` rows of `count` partial sums, and calls store(column, total) once for each column of a block. All threads of
  // the block call this function.
  template <typename Acc, typename Store>
  static __device__ __forceinline__ void add(const Acc* partials, int64_t height, int64_t count, int64_t block,
                                             const Store& store) {
    __shared__ Acc shared[kWarps][columns];
    const int lane_column = threadIdx.x % columns;
    const int64_t column = block * columns + lane_column;
    const bool has_column = column < count;
    Acc sum = 0;
    const Acc* next = partials + threadIdx.x / columns * count + column;
    for (int64_t first = threadIdx.x / columns; first < height; first += loads * rows) {
      Acc values[loads];
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        values[i] = has_column && first + i * rows < height ? *next : Acc(0);
        next += rows * count;
      }
#pragma unroll
      for (int i = 0; i < loads; ++i) sum += values[i];
    }
#pragma unroll
    for (int distance = columns; distance < kWarpSize; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (threadIdx.x % kWarpSize < columns) shared[threadIdx.x / kWarpSize][lane_column] = sum;
    __syncthreads();
    if (threadIdx.x >= columns || !has_column) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += shared[i][lane_column];
    store(column, sum);
  }
};

}  // namespace ssm_kernels::cuda
