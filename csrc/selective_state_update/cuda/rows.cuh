// The kernels of the selective state update share these: access to the elements of a row, sums over its lanes, and methods that
// are known at compile time or at run time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/discretization.h"
#include "cuda/vector_io.cuh"
#include "selective_state_update/cuda/launch.h"

namespace ssm_kernels::selective_state_update {

using cuda::Vector;

// The first `count` elements of a vector, one at a time; the others are zero. Strides are in elements.
template <int size, typename Scalar>
__device__ __forceinline__ Vector<Scalar, size> load_elements(int count, const Scalar* source, int64_t stride) {
  Vector<Scalar, size> result = Vector<Scalar, size>::zero();
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (i < count) result.set(i, source[i * stride]);
  }
  return result;
}
template <int size, typename Scalar>
__device__ __forceinline__ void store_elements(const Vector<Scalar, size>& values, int count, Scalar* target, int64_t stride) {
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (i < count) target[i * stride] = values[i];
  }
}

// The value of lane `source` of this lane's group.
template <typename T>
__device__ __forceinline__ T shuffle(T value, int source, int lanes) {
  return __shfl_sync(kAllLanes, value, source, lanes);
}
template <typename T>
__device__ __forceinline__ T* shuffle(T* value, int source, int lanes) {
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(value), source, lanes));
}

// Sums each row of `partial` over the lanes of a group. Lanes whose number is r modulo kRowsInFlight return the sum of row r.
template <typename Acc>
__device__ __forceinline__ Acc reduce_rows(const Acc (&partial)[kRowsInFlight], int lane, int lanes) {
  static_assert(kRowsInFlight == 4, "two exchanges leave one row");
  const bool upper = lane & 2, odd = lane & 1;
  Acc even_row = upper ? partial[2] : partial[0];
  Acc odd_row = upper ? partial[3] : partial[1];
  even_row += __shfl_xor_sync(kAllLanes, upper ? partial[0] : partial[2], 2);
  odd_row += __shfl_xor_sync(kAllLanes, upper ? partial[1] : partial[3], 2);
  Acc row = odd ? odd_row : even_row;
  row += __shfl_xor_sync(kAllLanes, odd ? even_row : odd_row, 1);
  for (int distance = kRowsInFlight; distance < lanes; distance *= 2) row += __shfl_xor_sync(kAllLanes, row, distance);
  return row;
}

// A method that the kernel reads from its parameters, one of SSM_BASIC_DISCRETIZATIONS: the general kernel is compiled once for
// all of them.
struct RuntimeMethod {
  Discretization discretization;
};
// One of SSM_FURTHER_DISCRETIZATIONS.
struct FurtherMethod {
  Discretization discretization;
  MethodParameters parameters;
};

template <typename Method>
__device__ __forceinline__ Method make_method(Discretization discretization, const MethodParameters& parameters = {}) {
  if constexpr (std::is_same_v<Method, RuntimeMethod>) {
    return {discretization};
  } else if constexpr (std::is_same_v<Method, FurtherMethod>) {
    return {discretization, parameters};
  } else {
    return {};
  }
}

// Calls visitor(method) with a method that is known at compile time.
template <typename Method, typename Visitor>
__device__ __forceinline__ void visit_method(const Method& method, const Visitor& visitor) {
  if constexpr (std::is_same_v<Method, RuntimeMethod>) {
    visit_basic_discretization(method.discretization, visitor);
  } else if constexpr (std::is_same_v<Method, FurtherMethod>) {
    visit_further_discretization(method.discretization, method.parameters, visitor);
  } else {
    visitor(method);
  }
}

}  // namespace ssm_kernels::selective_state_update
