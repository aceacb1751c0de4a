// Wide loads and stores, and conversion to and from the accumulation type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ssm_kernels::cuda {

// double for double, else float.
template <typename Scalar>
using AccumulateType = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

__device__ __forceinline__ float to_accumulate(float value) { return value; }
__device__ __forceinline__ double to_accumulate(double value) { return value; }
__device__ __forceinline__ float to_accumulate(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_accumulate(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Scalar>
__device__ __forceinline__ Scalar from_accumulate(AccumulateType<Scalar> value) {
  if constexpr (std::is_same_v<Scalar, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// The widest type that one instruction loads or stores of a vector of `bytes` bytes.
template <int bytes>
struct AccessOf {
  static_assert(bytes % 16 == 0, "a vector is 2, 4 or 8 bytes, or a multiple of 16");
  using type = uint4;
};
template <>
struct AccessOf<2> {
  using type = unsigned short;
};
template <>
struct AccessOf<4> {
  using type = unsigned int;
};
template <>
struct AccessOf<8> {
  using type = uint2;
};

// kSize elements that a thread moves together. Addresses are multiples of kAlignment bytes.
template <typename Scalar, int size>
struct Vector {
  static constexpr int kSize = size;
  static constexpr int kBytes = size * static_cast<int>(sizeof(Scalar));
  using Access = typename AccessOf<kBytes>::type;
  static constexpr int kAccesses = kBytes / static_cast<int>(sizeof(Access));
  static constexpr int kAlignment = sizeof(Access);

  Access accesses[kAccesses];

  __device__ __forceinline__ Scalar operator[](int i) const {
    Scalar value;
    memcpy(&value, reinterpret_cast<const char*>(accesses) + i * sizeof(Scalar), sizeof(Scalar));
    return value;
  }
  // An element in the accumulation type.
  __device__ __forceinline__ AccumulateType<Scalar> accumulate(int i) const {
    if constexpr (std::is_same_v<Scalar, __nv_bfloat16> && size % 2 == 0) {
      // bf16 is the upper half of a float. Extracting it from a pair takes one instruction.
      uint32_t pair;
      memcpy(&pair, reinterpret_cast<const char*>(accesses) + i / 2 * sizeof(pair), sizeof(pair));
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
      return to_accumulate((*this)[i]);
    }
  }
  __device__ __forceinline__ void set(int i, Scalar value) {
    memcpy(reinterpret_cast<char*>(accesses) + i * sizeof(Scalar), &value, sizeof(Scalar));
  }
  // Rounds values of the accumulation type, two at a time where one instruction converts two.
  __device__ __forceinline__ static Vector round(const AccumulateType<Scalar> (&values)[size]) {
    Vector result;
#pragma unroll
    for (int i = 0; i < size; i += 2) {
      if constexpr (size % 2 == 0 && std::is_same_v<Scalar, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
        memcpy(reinterpret_cast<char*>(result.accesses) + i * sizeof(Scalar), &pair, sizeof(pair));
      } else if constexpr (size % 2 == 0 && std::is_same_v<Scalar, __half>) {
        const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
        memcpy(reinterpret_cast<char*>(result.accesses) + i * sizeof(Scalar), &pair, sizeof(pair));
      } else {
        result.set(i, from_accumulate<Scalar>(values[i]));
        if (i + 1 < size) result.set(i + 1, from_accumulate<Scalar>(values[i + 1]));
      }
    }
    return result;
  }
  __device__ __forceinline__ static Vector zero() {
    Vector result;
    memset(&result, 0, sizeof(result));
    return result;
  }

  // Through the L1 cache: for data that other threads of the block read too.
  __device__ __forceinline__ static Vector load(const Scalar* source) {
    Vector result;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) result.accesses[i] = reinterpret_cast<const Access*>(source)[i];
    return result;
  }
  __device__ __forceinline__ void store(Scalar* target) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) reinterpret_cast<Access*>(target)[i] = accesses[i];
  }
  // The same at an address in shared memory. Accesses keep their order.
  __device__ __forceinline__ static Vector load_shared(uint32_t source) {
    static_assert(kAlignment == 16, "the instruction loads 16 bytes");
    Vector result;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      Access& v = result.accesses[i];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(source + i * kAlignment)
                   : "memory");
    }
    return result;
  }
  __device__ __forceinline__ void store_shared(uint32_t target) const {
    static_assert(kAlignment >= 8, "the instructions store 8 or 16 bytes");
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const Access& v = accesses[i];
      const uint32_t address = target + i * kAlignment;
      if constexpr (kAlignment == 8) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
      } else {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
      }
    }
  }
  // Bypasses the L1 cache: for data that is read once.
  __device__ __forceinline__ static Vector load_once(const Scalar* source) {
    Vector result;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) result.accesses[i] = __ldcg(reinterpret_cast<const Access*>(source) + i);
    return result;
  }
  __device__ __forceinline__ void store_once(Scalar* target) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) __stcg(reinterpret_cast<Access*>(target) + i, accesses[i]);
  }
};

}  // namespace ssm_kernels::cuda
