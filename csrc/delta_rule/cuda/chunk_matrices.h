// The layout of the chunk matrices (chunk_matrices_sm90.cuh) in memory, for the host, which allocates and describes them, and
// for the kernels.
//
// M^T of a chunk is an upper triangle of 64 x 64, as a hi/lo split. It is stored without the blocks of 16 x 16 left of the
// diagonal. Band w is 16 rows, from column 16 w on: first all rows of the high part, then those of the low part. A matrix is
// its four bands, one after the other.
//
// TMA describes each band of all matrices as a tensor, whose tiles begin 16 w columns before it: what is outside of the tensor
// becomes zeros. In shared memory a band has rows of 64 columns.
#pragma once

#include <cuda_runtime_api.h>

#include "common/macros.h"
#include "cuda/chunked/geometry.h"
#include "cuda/tma_descriptor.h"

namespace ssm_kernels::delta_rule {

constexpr int kBands = 4, kBandSteps = cuda::chunked::kChunk / kBands, kBandRows = 2 * kBandSteps;
SSM_HOST_DEVICE constexpr int band_columns(int band) { return cuda::chunked::kChunk - kBandSteps * band; }
// The elements of a matrix before a band.
SSM_HOST_DEVICE constexpr int band_offset(int band) {
  int offset = 0;
  for (int earlier = 0; earlier < band; ++earlier) offset += kBandRows * band_columns(earlier);
  return offset;
}
constexpr int kChunkMatrixElements = band_offset(kBands), kChunkMatrixBytes = 2 * kChunkMatrixElements;

// Describes the bands of `count` matrices at `data`, aligned to 16 bytes.
inline cudaError_t describe_chunk_matrices(cuda::TmaDescriptor (&bands)[kBands], void* data, int64_t count) {
  for (int band = 0; band < kBands; ++band) {
    const auto columns = static_cast<uint64_t>(band_columns(band));
    const cudaError_t error =
        cuda::make_tma_descriptor(bands[band], static_cast<char*>(data) + 2 * band_offset(band),
                                  {columns, uint64_t{kBandRows}, static_cast<uint64_t>(count), 1},
                                  {band_columns(band), kChunkMatrixElements, 0}, {cuda::chunked::kChunk, kBandRows, 1, 1});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ssm_kernels::delta_rule
