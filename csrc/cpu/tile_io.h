// Loads and stores tiles: copies between strided tensors and scratch memory, [steps][lanes] in the accumulation type.
//
// A lane is a channel or a state, a step is one of time. The functions vectorize tensors that are contiguous along either axis,
// along time in either direction by transposing square tiles in registers, and accept any other strides. Scratch rows are `row`
// values apart, a multiple of the vector length. A load fills the lanes up to the next multiple of the vector length with
// zeros, and may write as many steps, rounded up in the same way.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/integers.h"

namespace ssm_kernels {
// The inner namespace keeps the instruction sets' versions of these templates apart: their arguments are scalar types only.
inline namespace CPU_CAPABILITY {

// Loads a full vector, or `count` elements followed by zeros.
template <typename Acc, typename Scalar>
inline at::vec::Vectorized<Acc> load_as(const Scalar* source, int64_t count = at::vec::Vectorized<Acc>::size()) {
  using Vec = at::vec::Vectorized<Acc>;
  if constexpr (std::is_same_v<Acc, Scalar>) {
    return count == Vec::size() ? Vec::loadu(source) : Vec::loadu(source, count);
  } else {
    static_assert(std::is_same_v<Acc, float> && sizeof(Scalar) == 2, "16-bit types accumulate in float32");
    Vec result;
    if (count == Vec::size()) {
      at::vec::load_to_float<Scalar>(source, result);
    } else {
      Scalar padded[Vec::size()] = {};
      std::memcpy(padded, source, count * sizeof(Scalar));
      at::vec::load_to_float<Scalar>(padded, result);
    }
    return result;
  }
}

template <typename Acc, typename Scalar>
inline void store_as(Scalar* target, const at::vec::Vectorized<Acc>& value, int64_t count = at::vec::Vectorized<Acc>::size()) {
  if constexpr (std::is_same_v<Acc, Scalar>) {
    value.store(target, count);
  } else {
    static_assert(std::is_same_v<Acc, float> && sizeof(Scalar) == 2, "16-bit types accumulate in float32");
    at::vec::convert<Scalar>(value).store(target, count);
  }
}

// The same of elements whose addresses descend from the first one's.
template <typename Acc, typename Scalar>
inline at::vec::Vectorized<Acc> load_descending_as(const Scalar* first, int64_t count) {
  using Vec = at::vec::Vectorized<Acc>;
  if (count == Vec::size()) return at::vec::flip(load_as<Acc>(first - (Vec::size() - 1)));
  alignas(64) Acc padded[Vec::size()] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = static_cast<Acc>(first[-i]);
  return Vec::loadu(padded);
}

template <typename Acc, typename Scalar>
inline void store_descending_as(Scalar* first, const at::vec::Vectorized<Acc>& value, int64_t count) {
  using Vec = at::vec::Vectorized<Acc>;
  if (count == Vec::size()) {
    store_as<Acc>(first - (Vec::size() - 1), at::vec::flip(value));
    return;
  }
  alignas(64) Acc values[Vec::size()];
  value.store(values);
  for (int64_t i = 0; i < count; ++i) first[-i] = static_cast<Scalar>(values[i]);
}

// Stores two full vectors. Rounding them to fp16 or bf16 together takes fewer shuffles than one by one.
template <typename Acc, typename Scalar>
inline void store_pair_as(Scalar* target, const at::vec::Vectorized<Acc>& low, const at::vec::Vectorized<Acc>& high) {
  if constexpr (std::is_same_v<Acc, Scalar>) {
    low.store(target);
    high.store(target + at::vec::Vectorized<Acc>::size());
  } else {
    at::vec::convert_from_float<Scalar>(low, high).store(target);
  }
}

// Converts a row and pads it with zeros to a whole vector.
template <typename Acc, typename Scalar>
inline void load_row(Acc* target, const Scalar* source, int64_t count) {
  constexpr int64_t kSize = at::vec::Vectorized<Acc>::size();
  int64_t i = 0;
  for (; i + kSize <= count; i += kSize) load_as<Acc>(source + i).store(target + i);
  if (i < count) load_as<Acc>(source + i, count - i).store(target + i);
}

template <typename Acc, typename Scalar>
inline void store_row(Scalar* target, const Acc* source, int64_t count) {
  using Vec = at::vec::Vectorized<Acc>;
  constexpr int64_t kSize = Vec::size();
  int64_t i = 0;
  for (; i + 2 * kSize <= count; i += 2 * kSize) {
    store_pair_as<Acc>(target + i, Vec::loadu(source + i), Vec::loadu(source + i + kSize));
  }
  for (; i < count; i += kSize) store_as<Acc>(target + i, Vec::loadu(source + i), std::min(kSize, count - i));
}

// target[i][j] = source[j][i] for i, j < the vector length.
template <typename Acc>
inline void transpose_square(const Acc* source, int64_t source_row, Acc* target, int64_t target_row) {
  constexpr int kSize = at::vec::Vectorized<Acc>::size();
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<Acc, float>) {
    at::vec::transpose_mxn<float, kSize, kSize>(source, source_row, target, target_row);
    return;
  }
#endif
  for (int i = 0; i < kSize; ++i) {
    for (int j = 0; j < kSize; ++j) target[i * target_row + j] = source[j * source_row + i];
  }
}

template <typename Acc, typename Scalar>
void load_tile(Acc* tile, int64_t row, const Scalar* source, int64_t stride_lane, int64_t stride_step, int64_t lanes,
               int64_t steps) {
  using Vec = at::vec::Vectorized<Acc>;
  constexpr int64_t kSize = Vec::size();
  if (stride_lane == 1 || lanes == 1) {
    for (int64_t t = 0; t < steps; ++t) load_row(tile + t * row, source + t * stride_step, lanes);
  } else if (stride_step == 1 || stride_step == -1) {
    alignas(64) Acc square[kSize * kSize];
    for (int64_t lane = 0; lane < lanes; lane += kSize) {
      const int64_t rows = std::min(kSize, lanes - lane);
      for (int64_t i = rows; i < kSize; ++i) Vec(Acc(0)).store(square + i * kSize);
      for (int64_t t = 0; t < steps; t += kSize) {
        const Scalar* const first = source + lane * stride_lane + t * stride_step;
        const int64_t count = std::min(kSize, steps - t);
        if (stride_step == 1) {
          for (int64_t i = 0; i < rows; ++i) load_as<Acc>(first + i * stride_lane, count).store(square + i * kSize);
        } else {
          for (int64_t i = 0; i < rows; ++i) load_descending_as<Acc>(first + i * stride_lane, count).store(square + i * kSize);
        }
        transpose_square(square, kSize, tile + t * row + lane, row);
      }
    }
  } else {
    for (int64_t t = 0; t < steps; ++t) {
      if (stride_lane == 0) {  // broadcast
        std::fill(tile + t * row, tile + t * row + lanes, static_cast<Acc>(source[t * stride_step]));
      } else {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          tile[t * row + lane] = static_cast<Acc>(source[lane * stride_lane + t * stride_step]);
        }
      }
      std::fill(tile + t * row + lanes, tile + t * row + round_up(lanes, kSize), Acc(0));
    }
  }
}

template <typename Acc, typename Scalar>
void store_tile(Scalar* target, int64_t stride_lane, int64_t stride_step, const Acc* tile, int64_t row, int64_t lanes,
                int64_t steps) {
  using Vec = at::vec::Vectorized<Acc>;
  constexpr int64_t kSize = Vec::size();
  if (stride_lane == 1 || lanes == 1) {
    for (int64_t t = 0; t < steps; ++t) store_row(target + t * stride_step, tile + t * row, lanes);
  } else if (stride_step == 1 || stride_step == -1) {
    alignas(64) Acc square[kSize * kSize];
    for (int64_t lane = 0; lane < lanes; lane += kSize) {
      const int64_t rows = std::min(kSize, lanes - lane);
      for (int64_t t = 0; t < steps; t += kSize) {
        transpose_square(tile + t * row + lane, row, square, kSize);
        Scalar* const first = target + lane * stride_lane + t * stride_step;
        const int64_t count = std::min(kSize, steps - t);
        for (int64_t i = 0; i < rows; ++i) {
          const Vec values = Vec::loadu(square + i * kSize);
          if (stride_step == 1) {
            store_as<Acc>(first + i * stride_lane, values, count);
          } else {
            store_descending_as<Acc>(first + i * stride_lane, values, count);
          }
        }
      }
    }
  } else {
    for (int64_t t = 0; t < steps; ++t) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        target[lane * stride_lane + t * stride_step] = static_cast<Scalar>(tile[t * row + lane]);
      }
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels
