// Arrays in a block's shared memory, and their elements as arrays and vectors in registers.
#pragma once

#include "common/macros.h"
#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

using cuda::Vector;

// The elements in the opposite order.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> reversed(const Vector<Scalar, size>& source) {
  Vector<Scalar, size> result;
#pragma unroll
  for (int j = 0; j < size; ++j) result.set(j, source[size - 1 - j]);
  return result;
}

// `count` neighboring elements between memory and an array in registers.
template <typename T, int count>
__device__ __forceinline__ void load_array(const T* source, T (&values)[count]) {
  const auto vector = Vector<T, count>::load(source);
#pragma unroll
  for (int j = 0; j < count; ++j) values[j] = vector[j];
}
template <typename T, int count>
__device__ __forceinline__ Vector<T, count> vector_of(const T (&values)[count]) {
  Vector<T, count> vector;
#pragma unroll
  for (int j = 0; j < count; ++j) vector.set(j, values[j]);
  return vector;
}
template <typename T, int count>
__device__ __forceinline__ void store_array(T* target, const T (&values)[count]) {
  vector_of(values).store(target);
}

// Allocates arrays in a block's shared memory. With a null base it only counts bytes.
class SharedAllocator {
 public:
  SSM_HOST_DEVICE explicit SharedAllocator(unsigned char* memory) : begin_(memory), next_(memory) {}

  template <typename T>
  SSM_HOST_DEVICE T* allocate(int count) {
    T* const array = reinterpret_cast<T*>(next_);
    next_ += (static_cast<size_t>(count) * sizeof(T) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    return array;
  }
  SSM_HOST_DEVICE int64_t bytes() const { return next_ - begin_; }

 private:
  unsigned char* begin_;
  unsigned char* next_;
};

}  // namespace ssm_kernels::selective_scan
