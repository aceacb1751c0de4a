// An element of a tensor that has the inputs' type or the accumulation type, as the call says.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/vector_io.cuh"

namespace ssm_kernels::cuda {

// Zero before it is loaded. value() converts it and is the first to wait for it.
template <typename Input, typename Acc = AccumulateType<Input>>
struct Either {
  uint32_t bits = 0;

  __device__ __forceinline__ void load(const void* data, int64_t offset, bool is_input_kind) {
    static_assert(sizeof(Input) == 2 && sizeof(Acc) == 4);
    bits = is_input_kind ? static_cast<const unsigned short*>(data)[offset] : static_cast<const uint32_t*>(data)[offset];
  }
  __device__ __forceinline__ Acc value(bool is_input_kind) const {
    if (!is_input_kind) return __uint_as_float(bits);
    const unsigned short half = static_cast<unsigned short>(bits);
    Input input;
    memcpy(&input, &half, sizeof(input));
    return to_accumulate(input);
  }
};
template <typename Acc>
struct Either<Acc, Acc> {
  Acc loaded = 0;

  __device__ __forceinline__ void load(const void* data, int64_t offset, bool) {
    loaded = static_cast<const Acc*>(data)[offset];
  }
  __device__ __forceinline__ Acc value(bool) const { return loaded; }
};

}  // namespace ssm_kernels::cuda
