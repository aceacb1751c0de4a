// The places of groups, and vectors of rows and parameters, of the element type or the accumulation type, in registers.
#pragma once

#include <type_traits>

#include "cuda/shifted_io.cuh"
#include "cuda/vector_io.cuh"
#include "norm/cuda/launch.h"

namespace ssm_kernels::norm {

using cuda::AccumulateType;
using cuda::from_accumulate;
using cuda::to_accumulate;
using cuda::Vector;

// double has no vector kernels: its elementary functions are long, and would be compiled many times.
template <typename Scalar>
constexpr bool kHasVectorKernels = !std::is_same_v<Scalar, double>;
template <typename Scalar>
constexpr int kVectorSize = kHasVectorKernels<Scalar> ? kVectorBytes / static_cast<int>(sizeof(Scalar)) : 1;

template <typename Scalar>
constexpr int kVectorsOfThread = kHasVectorKernels<Scalar> ? kThreadColumns / kVectorSize<Scalar> : 1;

// The aligned kernels count rows in 32 bits, which saves registers; calls of kMaxNarrowRows or more use the others.
template <bool is_aligned>
using RowIndex = std::conditional_t<is_aligned, int, int64_t>;

// a / b of numbers that are not negative: a division of 64 bits takes four times as long as one of 32.
__device__ __forceinline__ int divide(int a, int b) { return a / b; }
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The position of a group: its row's indices along the two merged leading axes, and its first column.
template <typename Row>
struct GroupIndex {
  Row outer, inner;
  int first_column;

  __device__ __forceinline__ GroupIndex(const NormParams& p, Row row, int group) {
    outer = p.outer == 1 ? 0 : divide(row, static_cast<Row>(p.inner));
    inner = row - outer * static_cast<Row>(p.inner);
    first_column = group * static_cast<int>(p.group_size);
  }
  __device__ __forceinline__ int64_t offset(const RowsView& view) const {
    return outer * view.stride_outer + inner * view.stride_inner + first_column;
  }
};

template <typename Scalar, int size>
__device__ __forceinline__ void to_values(const Vector<Scalar, size>& vector, AccumulateType<Scalar> (&values)[size]) {
#pragma unroll
  for (int j = 0; j < size; ++j) values[j] = vector.accumulate(j);
}

template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> from_values(const AccumulateType<Scalar> (&values)[size]) {
  Vector<Scalar, size> vector;
#pragma unroll
  for (int j = 0; j < size; ++j) vector.set(j, from_accumulate<Scalar>(values[j]));
  return vector;
}

// Loads a vector of a tensor of type Scalar or, if is_accumulate, of the accumulation type.
template <typename Scalar, int size>
__device__ __forceinline__ void load_values(const void* data, bool is_accumulate, int64_t offset,
                                            AccumulateType<Scalar> (&values)[size]) {
  using Acc = AccumulateType<Scalar>;
  if (!std::is_same_v<Scalar, Acc> && is_accumulate) {
    to_values(Vector<Acc, size>::load(static_cast<const Acc*>(data) + offset), values);
  } else {
    to_values(Vector<Scalar, size>::load(static_cast<const Scalar*>(data) + offset), values);
  }
}

// The first `count` values from any element on, zeros beyond them. `existing` values may be read.
template <typename Scalar, int size>
__device__ __forceinline__ void load_shifted_values(const void* data, bool is_accumulate, int64_t offset, int count,
                                                    int existing, AccumulateType<Scalar> (&values)[size]) {
  using Acc = AccumulateType<Scalar>;
  if constexpr (std::is_same_v<Scalar, double>) {
#pragma unroll
    for (int j = 0; j < size; ++j) values[j] = j < count ? static_cast<const double*>(data)[offset + j] : 0.0;
  } else if (!std::is_same_v<Scalar, Acc> && is_accumulate) {
    to_values(cuda::ShiftedLoad<Acc, size>(static_cast<const Acc*>(data) + offset, existing).vector(), values);
  } else {
    to_values(cuda::ShiftedLoad<Scalar, size>(static_cast<const Scalar*>(data) + offset, existing).vector(), values);
  }
  if (count < size) {
#pragma unroll
    for (int j = 0; j < size; ++j) values[j] = j < count ? values[j] : AccumulateType<Scalar>(0);
  }
}

template <typename Scalar, int size>
__device__ __forceinline__ void load_parameter(const ParameterView& view, int64_t offset, AccumulateType<Scalar> absent,
                                               AccumulateType<Scalar> (&values)[size]) {
  if (view.data != nullptr) return load_values<Scalar>(view.data, view.is_accumulate, offset, values);
#pragma unroll
  for (int j = 0; j < size; ++j) values[j] = absent;
}

// Whether a parameter is absent, or its values from a column on start at a multiple of 16 bytes.
template <typename Scalar>
__device__ __forceinline__ bool is_vector_aligned(const ParameterView& view, int64_t offset) {
  if (view.data == nullptr) return true;
  const auto element_bytes = static_cast<uintptr_t>(view.is_accumulate ? sizeof(AccumulateType<Scalar>) : sizeof(Scalar));
  return (reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(offset) * element_bytes) % kVectorBytes == 0;
}

// The first `count` values of a parameter from any column on, 0 beyond them. The parameter has `existing` values there: lanes
// at the end of a group read those of the next group too, in the same accesses as other lanes, and drop them.
template <typename Scalar, int size>
__device__ __forceinline__ void load_shifted_parameter(const ParameterView& view, int64_t offset, int count, int existing,
                                                       AccumulateType<Scalar> absent, AccumulateType<Scalar> (&values)[size]) {
  using Acc = AccumulateType<Scalar>;
  if (view.data == nullptr) {
#pragma unroll
    for (int j = 0; j < size; ++j) values[j] = j < count ? absent : Acc(0);
  } else if (count >= size && is_vector_aligned<Scalar>(view, offset)) {
    load_values<Scalar>(view.data, view.is_accumulate, offset, values);
  } else {
    load_shifted_values<Scalar>(view.data, view.is_accumulate, offset, count, existing, values);
  }
}

template <typename Scalar, int size>
__device__ __forceinline__ void store_values(const RowsView& view, int64_t offset,
                                             const AccumulateType<Scalar> (&values)[size]) {
  using Acc = AccumulateType<Scalar>;
  if (!std::is_same_v<Scalar, Acc> && view.is_accumulate) {
    from_values<Acc>(values).store(static_cast<Acc*>(view.data) + offset);
  } else {
    from_values<Scalar>(values).store(static_cast<Scalar*>(view.data) + offset);
  }
}

// Stores the first `count` values from any element on.
template <typename Scalar, int size>
__device__ __forceinline__ void store_shifted_values(const RowsView& view, int64_t offset, int count,
                                                     const AccumulateType<Scalar> (&values)[size]) {
  using Acc = AccumulateType<Scalar>;
  if (!std::is_same_v<Scalar, Acc> && view.is_accumulate) {
    cuda::store_shifted(static_cast<Acc*>(view.data) + offset, from_values<Acc>(values), count);
  } else {
    cuda::store_shifted(static_cast<Scalar*>(view.data) + offset, from_values<Scalar>(values), count);
  }
}

// The first `count` values of a parameter of p.columns() values: all of them, from a multiple of 16 bytes on, if is_whole. With
// is_aligned, groups are whole vectors.
template <typename Scalar, bool is_aligned, int size>
__device__ __forceinline__ void load_parameter_part(const NormParams& p, const ParameterView& view, int offset, bool is_whole,
                                                    int count, AccumulateType<Scalar> absent,
                                                    AccumulateType<Scalar> (&values)[size]) {
  if constexpr (!is_aligned) {
    const int existing = static_cast<int>(p.columns()) - offset;
    if (!is_whole) return load_shifted_parameter<Scalar>(view, offset, count, existing, absent, values);
  }
  load_parameter<Scalar>(view, offset, absent, values);
}

}  // namespace ssm_kernels::norm
