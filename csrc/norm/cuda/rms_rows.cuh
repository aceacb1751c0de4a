// Device functions that the RMSNorm kernels share: the rows of a block, the columns of a thread, and stages in shared memory.
//
// A block of whole warps takes one group of every row_step-th row. A thread keeps the same kThreadColumns columns for all of
// these rows, in vectors of kSize columns. Vector i of a lane begins at column (warp * kVectors + i) * 32 * kSize + lane *
// kSize of the group. The addresses of a thread's vectors thus differ by constants, which the instructions encode, and the
// addresses of rows are the same for the whole block and take uniform registers.
//
// Each kernel is compiled twice. With is_any, rows start and end at any element: a warp copies its columns, which are
// contiguous, as aligned pieces and moves them in shared memory (cuda/shifted_segment.cuh). The blocks of a cluster then share
// a group that is too long for one block, each with consecutive columns. Columns belong to threads as in the aligned kernel,
// and so sums have the same bits.
#pragma once

#include "common/activations.h"
#include "cuda/lane_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/shifted_segment.cuh"
#include "norm/cuda/rms.h"
#include "norm/cuda/row_values.cuh"

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

// The same over the blocks of a cluster. Each warp writes its sum to all of them.
__device__ __forceinline__ float sum_over_cluster(float value, float* shared, int warps, int blocks, int warp, int lane) {
  value = cuda::sum_over_warp(value);
  if (lane < blocks) cuda::store_cluster(shared + cuda::cluster_rank() * warps + warp, lane, value);
  cuda::cluster_barrier();
  float sum = 0;
  for (int i = lane; i < blocks * warps; i += kWarpSize) sum += shared[i];
  return cuda::sum_over_warp(sum);
}

// 1 / sqrt(x) for x >= 0: rsqrtf, within 2 ulp, and a Newton step unless x is 0 or infinite, where the step gives NaN.
__device__ __forceinline__ float reciprocal_sqrt(float x) {
  const float y = rsqrtf(x);
  const float refined = Math<float>::fma(y * 0.5f, Math<float>::fma(-x * y, y, 1.0f), y);
  return y > 0.0f && x > 0.0f ? refined : y;
}

// The group of the block and its first row; the block's columns in the group, and the thread's first column among them. Without
// is_any a block has all columns of the group.
template <bool is_any>
struct RmsPlace {
  int warp, lane, group, first_row, first_column;
  int block_column = 0;  // the first column of the block
  int columns;           // of the group from there on

  __device__ __forceinline__ RmsPlace(const RmsParams& p, int vector_size, unsigned int block = blockIdx.x) {
    warp = threadIdx.x / kWarpSize;
    lane = threadIdx.x % kWarpSize;
    unsigned int unit = block;
    if constexpr (is_any) {
      unit = block / static_cast<unsigned int>(p.cluster);
      block_column = (block - unit * p.cluster) * p.warps * kWarpSize * kThreadColumns;
    }
    columns = p.group_size - block_column;
    first_row = unit / p.groups;
    group = unit - first_row * p.groups;
    // opaque, here and below: the compiler would otherwise recompute these offsets at each use.
    first_column = cuda::opaque(warp * kWarpSize * kThreadColumns + lane * vector_size);
  }

  // How many columns the group has from the first one of the warp on, or from one of the thread on; possibly fewer than 0.
  __device__ __forceinline__ int left_of_warp() const { return columns - warp * kWarpSize * kThreadColumns; }
  __device__ __forceinline__ int left(int offset) const { return columns - first_column - offset; }
};

// Addresses of one group in several tensors; advance() moves them to the block's next row.
template <int count>
class RowCursor {
 public:
  // Follows the first `count` streams.
  template <int size, bool is_any>
  __device__ __forceinline__ RowCursor(const RmsParams& p, const RowStream (&streams)[size], const RmsPlace<is_any>& place) {
    static_assert(count <= size, "each row is of a stream");
    const int outer = place.first_row / p.inner;
    inner_ = place.first_row - outer * p.inner;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      at_[i] = streams[i].data + outer * streams[i].outer + inner_ * streams[i].inner + place.group * streams[i].group;
      if constexpr (is_any) at_[i] += (blockIdx.x % static_cast<unsigned>(p.cluster)) * streams[i].block;
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
  template <typename Element, bool is_any>
  __device__ __forceinline__ Element* at(int stream, const RmsPlace<is_any>& place) const {
    return reinterpret_cast<Element*>(at_[stream] + static_cast<uint32_t>(place.first_column) * sizeof(Element));
  }
  // The columns of the thread's warp begin here.
  template <typename Element, bool is_any>
  __device__ __forceinline__ char* segment(int stream, const RmsPlace<is_any>& place) const {
    return at_[stream] + static_cast<uint32_t>(place.warp * kWarpSize * kThreadColumns) * sizeof(Element);
  }
  // How far a row starts past a multiple of 16 bytes.
  __device__ __forceinline__ int past(int stream) const { return cuda::bytes_past_multiple<kVectorBytes>(at_[stream]); }

 private:
  char* at_[count];
  int inner_;
};

// How far the rows of the last `stages` copies of `count` streams start past multiples of 16 bytes, packed into a register.
template <int count, int stages>
class ShiftQueue {
 public:
  __device__ __forceinline__ void push(const RowCursor<count>& rows) {
    packed_ <<= kRowBits;
#pragma unroll
    for (int i = 0; i < count; ++i) packed_ |= (rows.past(i) / 2) << (i * kBits);
  }
  // Bytes that the oldest row is shifted by.
  __device__ __forceinline__ int past(int stream) const {
    return (packed_ >> ((stages - 1) * kRowBits + stream * kBits) & ((1 << kBits) - 1)) * 2;
  }

 private:
  static constexpr int kBits = 3, kRowBits = count * kBits;  // elements have at least 2 bytes
  static_assert(kVectorBytes / 2 == 1 << kBits && stages * kRowBits <= 32, "all rows fit into a register");
  unsigned int packed_ = 0;
};

// Sums a value over the columns of a group: over the block or, with is_any, the cluster. `buffer` alternates between 0 and
// kMaxWarps.
template <bool is_any>
__device__ __forceinline__ float sum_over_group(float value, const RmsParams& p, const RmsPlace<is_any>& place, float* shared,
                                                int buffer) {
  if (!is_any || p.cluster == 1) return sum_over_block(value, shared + buffer, p.warps, place.warp, place.lane);
  float* const sums = shared + buffer * cuda::kMaxClusterBlocks;
  return sum_over_cluster(value, sums, p.warps, p.cluster, place.warp, place.lane);
}

// Loads the weights of a thread's columns, 0 beyond the group.
template <typename Scalar, bool is_any, int vectors, int size>
__device__ __forceinline__ void load_weight(const RmsParams& p, const RmsPlace<is_any>& place, float (&weight)[vectors][size]) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = place.first_column + i * kWarpSize * size;
    if constexpr (is_any) {
      const int left = place.left(i * kWarpSize * size);
      load_shifted_parameter<Scalar>(p.weight, place.group * p.group_size + place.block_column + column, left, left, 1,
                                     weight[i]);
    } else if (column < place.columns) {
      load_parameter<Scalar>(p.weight, place.group * p.group_size + column, 1, weight[i]);
    } else {
#pragma unroll
      for (int j = 0; j < size; ++j) weight[i][j] = 0;
    }
  }
}

// One input of a warp in a stage of shared memory; vector i of all lanes is contiguous. A lane moves 4, 8 or 16 bytes at a
// time.
template <typename Element, int size, int vectors, bool is_any>
struct StagedInput {
  static constexpr int kLaneBytes = size * static_cast<int>(sizeof(Element)), kVectorStride = kWarpSize * kLaneBytes;
  static constexpr int kBytes = vectors * kVectorStride + (is_any ? kShiftedInputBytes : 0);
  using Values = Vector<Element, size>;
  using Segment = cuda::ShiftedSegment<Element, vectors * kVectorStride>;
  static_assert(kShiftedInputBytes == cuda::kCpAsyncBytes, "the plan counts the bytes of a shifted input");

  static __device__ __forceinline__ Values load(const char* input, int i) {
    return Values::load(reinterpret_cast<const Element*>(input + i * kVectorStride));
  }
  static __device__ __forceinline__ void copy(char* input, int i, const Element* source) {
    cuda::cp_async<kLaneBytes>(input + i * kVectorStride, source + i * kWarpSize * size);
  }
  static __device__ __forceinline__ void clear(char* input, int i) { replace(input, i, Values::zero()); }
  static __device__ __forceinline__ void replace(char* input, int i, const Values& values) {
    values.store(reinterpret_cast<Element*>(input + i * kVectorStride));
  }
};

// Rounds a thread's values to elements of type Element and stores them in the current row of a stream. With is_any they pass
// through the warp's place in shared memory, which begins at `segment` and whose input has been read.
template <typename Staged, typename Element, int count, bool is_any, int vectors, int size>
__device__ __forceinline__ void store_values(const RowCursor<count>& rows, int stream, const RmsPlace<is_any>& place,
                                             const float (&values)[vectors][size], const bool (&is_valid)[vectors],
                                             char* segment) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const auto rounded = Vector<Element, size>::round(values[i]);
    if constexpr (is_any) {
      Staged::replace(segment + place.lane * Staged::kLaneBytes, i, rounded);
    } else {
      if (is_valid[i]) rounded.store(rows.template at<Element>(stream, place) + i * kWarpSize * size);
    }
  }
  if constexpr (is_any) {
    __syncwarp();
    Staged::Segment::store(rows.template segment<Element>(stream, place), segment + place.lane * kVectorBytes,
                           place.left_of_warp() * static_cast<int>(sizeof(Element)), place.lane);
  }
}

template <typename Params>
int count_rms_clusters(void (*kernel)(Params), const RmsPlan& plan) {
  return cuda::resident_clusters(kernel, plan.warps * kWarpSize, plan.shared_bytes, plan.cluster);
}

template <typename Params>
cudaError_t launch_rms(void (*kernel)(Params), int64_t groups, const RmsPlan& plan, cudaStream_t stream, const Params& params) {
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, plan.shared_bytes); error != cudaSuccess) return error;
  const int64_t blocks = groups * plan.row_blocks * plan.cluster;
  return cuda::launch_clusters(kernel, blocks, plan.warps * kWarpSize, plan.shared_bytes, plan.cluster, stream, params);
}

}  // namespace ssm_kernels::norm
