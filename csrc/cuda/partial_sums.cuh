// The second stage of sums over blocks: adds rows of partial sums, which the blocks of another kernel have written, in a fixed
// order.
//
//   total[c] = sum over r of partials[r][c]
//
// A block takes kPartialSumColumns neighboring columns; kPartialSumRows threads per column each add every kPartialSumRows-th
// row. The lanes of a warp that share a column then add their sums by shuffles, and the first warp adds those of all warps.
#pragma once

#include <cstdint>

#include "cuda/constants.h"

namespace ssm_kernels::cuda {

// Eight columns are a 32-byte sector of float32. More would make too few blocks to fill the device.
constexpr int kPartialSumColumns = 8, kPartialSumRows = 64, kPartialSumThreads = kPartialSumColumns * kPartialSumRows;
// Minimum of resident blocks per multiprocessor, for __launch_bounds__.
template <typename Acc>
constexpr int kPartialSumBlocks = sizeof(Acc) == 4 ? 3 : 1;

inline int64_t partial_sum_blocks(int64_t columns) { return (columns + kPartialSumColumns - 1) / kPartialSumColumns; }

// Calls store(column, total) once for each column of a block. All threads of the block call this function.
template <typename Acc, typename Store>
__device__ __forceinline__ void add_partial_sums(const Acc* partials, int64_t rows, int64_t columns, int64_t block,
                                                 const Store& store) {
  constexpr int kLoads = 16;  // in flight per thread
  constexpr int kWarps = kPartialSumThreads / kWarpSize;
  __shared__ Acc shared[kWarps][kPartialSumColumns];
  const int lane_column = threadIdx.x % kPartialSumColumns;
  const int64_t column = block * kPartialSumColumns + lane_column;
  const bool has_column = column < columns;
  Acc sum = 0;
  const Acc* next = partials + threadIdx.x / kPartialSumColumns * columns + column;
  for (int64_t first = threadIdx.x / kPartialSumColumns; first < rows; first += kLoads * kPartialSumRows) {
    Acc values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      values[i] = has_column && first + i * kPartialSumRows < rows ? *next : Acc(0);
      next += kPartialSumRows * columns;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += values[i];
  }
#pragma unroll
  for (int distance = kPartialSumColumns; distance < kWarpSize; distance *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (threadIdx.x % kWarpSize < kPartialSumColumns) shared[threadIdx.x / kWarpSize][lane_column] = sum;
  __syncthreads();
  if (threadIdx.x >= kPartialSumColumns || !has_column) return;
  sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared[i][lane_column];
  store(column, sum);
}

}  // namespace ssm_kernels::cuda
