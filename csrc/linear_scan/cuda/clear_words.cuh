// Sets the words of the tile kernels' carry to zero (tile_carry.cuh). Every block lets the next kernel start at once; that
// kernel waits for this one before it takes a ticket (launch_tiles), so that its launch costs no time.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "linear_scan/cuda/launch.h"

namespace ssm_kernels::linear_scan {
namespace {

constexpr int kClearThreads = 256, kClearVectors = 8;  // of 16 bytes for each thread

__global__ void __launch_bounds__(kClearThreads) clear_words_kernel(ulonglong2* words, int64_t vectors) {
  cuda::launch_dependents();
  const int64_t first = int64_t(blockIdx.x) * (kClearThreads * kClearVectors) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kClearVectors; ++i) {
    if (const int64_t at = first + i * kClearThreads; at < vectors) words[at] = {0, 0};
  }
}

}  // namespace

cudaError_t launch_clear_words(const Partition& partition, cudaStream_t stream) {
  const int64_t vectors = ceil_div(partition.words, 2);
  return cuda::launch(clear_words_kernel, ceil_div(vectors, kClearThreads * kClearVectors), kClearThreads, 0, stream,
                      /*uses_pdl=*/false, reinterpret_cast<ulonglong2*>(partition.ticket_counter), vectors);
}

}  // namespace ssm_kernels::linear_scan
