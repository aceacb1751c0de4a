// Shared by forward and backward of the RMSNorm kernels: the rows of a block, the columns of a thread, and the inputs in shared
// memory.
//
// A block of whole warps takes one group of every row_step-th row. A thread keeps its columns for all of these rows:
// kThreadColumns of them, in vectors of kSize columns. Vector i of a lane begins at column
// (warp * kVectors + i) * 32 * kSize + lane * kSize of the group, so that the addresses of a thread's vectors differ by
// constants, which instructions hold. Addresses of rows are the same for the whole block and take uniform registers.
#pragma once

#include "common/activations.h"
#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/device.cuh"
#include "norm/cuda/rms.h"

namespace ssm_kernels::norm {

// Keeps the compiler from computing a value again at each use, which takes more instructions than the register is worth.
__device__ __forceinline__ int kept_in_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Sums a value over the block; all lanes get the same bits. Calls alternate between two `shared` buffers: the barrier of the
// next call separates the reads of this one from the next writes to the same buffer.
__device__ __forceinline__ float sum_over_block(float value, float* shared, int warps, int warp, int lane) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  if (warps == 1) return value;
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < warps ? shared[lane] : 0.0f;
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// 1 / sqrt(x) for x >= 0: the approximation, within 2 ulp, and a Newton step, which 0 and infinity do not survive.
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
    first_column = kept_in_register(warp * kWarpSize * kThreadColumns + lane * vector_size);
  }
};

// The same group of several tensors, in the rows of the block, one row after the other.
template <int count>
class RowCursor {
 public:
  // The first `count` of the streams.
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
  // Additions, in place of products for each row. A step leaves the inner rows once at most, as RowStream is made.
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

// The weights of a thread's columns; 0 beyond the group.
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

// One input of a warp in a stage: vector i of the lanes is contiguous. Reads and copies are of 4, 8 or 16 bytes a lane.
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
