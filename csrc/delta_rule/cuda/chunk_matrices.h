// The layout of the chunk matrices (chunk_matrices_sm90.cuh) in memory, for the host, which allocates and describes them, and
// for the kernels.
//
// M^T of a chunk is an upper triangle of 64 x 64, as a hi/lo split. It is stored without the blocks of 16 x 16 left of the
// diagonal. Band w is 16 rows, from column 16 w on. A matrix is its four bands, one after the other.
//
// A band consists of blocks of 8 x 8 elements, 128 contiguous bytes, whose words are in the order of the lanes that hold them
// as accumulators: a warp stores a block at once, and wgmma reads it without a swizzle. For each 8 columns a band has the high
// part's two blocks of rows, then the low part's two.
#pragma once

#include "common/macros.h"
#include "cuda/chunked/geometry.h"

namespace ssm_kernels::delta_rule {

constexpr int kBands = 4, kBandSteps = cuda::chunked::kChunk / kBands;
constexpr int kMatrixBlockBytes = 128, kMatrixColumnBytes = 4 * kMatrixBlockBytes;  // a block; the four blocks of 8 columns
SSM_HOST_DEVICE constexpr int band_bytes(int band) {
  return (cuda::chunked::kChunk - kBandSteps * band) / 8 * kMatrixColumnBytes;
}
// The bytes of a matrix before a band: the sum of band_bytes() of those before it.
SSM_HOST_DEVICE constexpr int band_offset(int band) {
  return band * band_bytes(0) - band * (band - 1) / 2 * (band_bytes(0) - band_bytes(1));
}
constexpr int kChunkMatrixBytes = band_offset(kBands);

}  // namespace ssm_kernels::delta_rule
