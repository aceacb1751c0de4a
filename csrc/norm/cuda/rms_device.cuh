// Device functions that the RMSNorm kernels share: the rows of a block, the columns of a thread, and stages in shared memory.
//
// A block of whole warps takes one group of every row_step-th row. A thread keeps the same kThreadColumns columns for all of
// these rows, in vectors of kSize columns. Vector i of a lane begins at column (warp * kVectors + i) * 32 * kSize + lane *
// kSize of the group. The addresses of a thread's vectors thus differ by constants, which the instructions encode, and the
// addresses of rows are the same for the whole block and take uniform registers.
#pragma once

#include "common/activations.h"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/device.cuh"
#include "norm/cuda/rms.h"

namespace ssm_kernels::norm {

// Sums a value over the block; all lanes get the same bits. Calls alternate between two `shared` buffers: the barrier of the
// next call separates the reads of this one from the next writes to the same buffer.
__device__ __forceinline__ float sum_over_block(float value, float* shared, int warps, int warp, int lane) {
  value = cuda::sum_over_warp(value);
  if (warps == 1) return value;
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  return cuda::sum_over_warp(lane < warps ? shared[lane] : 0.0f);
}

// 1 / sqrt(x) for x >= 0: rsqrtf, within 2 ulp, and a Newton step unless x is 0 or infinite, where the step gives NaN.
__device__ __forceinline__ float reciprocal_sqrt(float x) {
  const float y = rsqrtf(x);
  const float refined = Math<float>::fma(y * 0.5f, Math<float>::fma(-x * y, y, 1.0f), y);
  return y > 0.0f && x > 0.0f ? refined : y;
}

// The group of the block and its first row; the thread's first column in the group.
struct RmsPlace {
  int warp, lane, group, first_row, first_column;

  __device__ __forceinline__ RmsPlace(const RmsParams& p, int vector_size) {
    warp = threadIdx.x / kWarpSize;
    lane = threadIdx.x % kWarpSize;
    first_row = blockIdx.x / p.groups;
    group = blockIdx.x - first_row * p.groups;
    // opaque, here and below: the compiler would otherwise recompute these offsets at each use.
    first_column = cuda::opaque(warp * kWarpSize * kThreadColumns + lane * vector_size);
  }
};

// Addresses of one group in several tensors; advance() moves them to the block's next row.
template <int count>
class RowCursor {
 public:
  // Follows the first `count` streams.
  template <int size>
  __device__ __forceinline__ RowCursor(const RmsParams& p, const RowStream (&streams)[size], const RmsPlace& place) {
    static_assert(count <= size, "each row is of a stream");
    const int outer = place.first_row / p.inner;
    inner_ = place.first_row - outer * p.inner;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      at_[i] = streams[i].data + outer * streams[i].outer + inner_ * streams[i].inner + place.group * streams[i].group;
    }
  }
  // Takes additions only. A step passes the end of an outer row at most once, because inner_step < inner.
  template <int size>
  __device__ __forceinline__ void advance(const RmsParams& p, const RowStream (&streams)[size]) {
#pragma unroll
    for (int i = 0; i < count; ++i) at_[i] += streams[i].step;
    inner_ += p.inner_step;
    if (inner_ >= p.inner) {
      inner_ -= p.inner;
#pragma unroll
      for (int i = 0; i < count; ++i) at_[i] += streams[i].wrap;
    }
  }
  template <typename Element>
  __device__ __forceinline__ Element* at(int stream, const RmsPlace& place) const {
    return reinterpret_cast<Element*>(at_[stream] + static_cast<uint32_t>(place.first_column) * sizeof(Element));
  }

 private:
  char* at_[count];
  int inner_;
};

// Loads the weights of a thread's columns, 0 beyond the group.
template <typename Scalar, int vectors, int size>
__device__ __forceinline__ void load_weight(const RmsParams& p, const RmsPlace& place, float (&weight)[vectors][size]) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = place.first_column + i * kWarpSize * size;
    if (column < p.group_size) {
      load_parameter<Scalar>(p.weight, place.group * p.group_size + column, 1, weight[i]);
    } else {
#pragma unroll
      for (int j = 0; j < size; ++j) weight[i][j] = 0;
    }
  }
}

// One input of a warp in a stage of shared memory; vector i of all lanes is contiguous. A lane moves 4, 8 or 16 bytes at a
// time.
template <typename Element, int size, int vectors>
struct StagedInput {
  static constexpr int kLaneBytes = size * static_cast<int>(sizeof(Element)), kVectorStride = kWarpSize * kLaneBytes;
  static constexpr int kBytes = vectors * kVectorStride;
  using Values = Vector<Element, size>;

  static __device__ __forceinline__ Values load(const char* input, int i) {
    return Values::load(reinterpret_cast<const Element*>(input + i * kVectorStride));
  }
  static __device__ __forceinline__ void copy(char* input, int i, const Element* source) {
    cuda::cp_async<kLaneBytes>(input + i * kVectorStride, source + i * kWarpSize * size);
  }
  static __device__ __forceinline__ void clear(char* input, int i) {
    Values::zero().store(reinterpret_cast<Element*>(input + i * kVectorStride));
  }
};

}  // namespace ssm_kernels::norm
