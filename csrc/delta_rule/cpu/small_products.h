// Products of small matrices in the caches, for cpu/kernel.cpp, which is compiled once per instruction set.
//
// Rows of scratch memory are whole vectors: elements after the last column are zero or not read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/integers.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"

namespace ssm_kernels::delta_rule {
inline namespace CPU_CAPABILITY {

template <typename T>
constexpr int64_t padded(int64_t columns) {
  return round_up(columns, Vec<T>::size());
}

// Hands out parts of the scratch memory.
class Scratch {
 public:
  explicit Scratch(std::byte* memory) : next_(memory) {}

  template <typename T>
  T* take(int64_t count) {
    T* const result = reinterpret_cast<T*>(next_);
    next_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return result;
  }

 private:
  std::byte* next_;
};

// A matrix whose element (i, j) is at i * row + j * column.
template <typename T>
struct Factor {
  const T* data;
  int64_t row, column = 1;

  Factor from(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
  Factor transposed() const { return {data, column, row}; }
};

// A matrix whose rows are contiguous, up to a whole vector.
template <typename T>
struct Rows {
  T* data;
  int64_t row;

  T* operator[](int64_t i) const { return data + i * row; }
  Rows from(int64_t i, int64_t j = 0) const { return {data + i * row + j, row}; }
  Factor<T> factor() const { return {data, row}; }
  operator Rows<const T>() const { return {data, row}; }
};

template <typename T>
Rows<T> take_rows(Scratch& scratch, int64_t rows, int64_t columns) {
  return {scratch.take<T>(rows * padded<T>(columns)), padded<T>(columns)};
}

// Rows of memory, in place if they are whole vectors.
template <typename T>
Rows<const T> as_rows(Scratch& scratch, const void* data, int64_t rows, int64_t columns) {
  const T* const source = static_cast<const T*>(data);
  if (padded<T>(columns) == columns) return {source, columns};
  const Rows<T> copy = take_rows<T>(scratch, rows, columns);
  for (int64_t i = 0; i < rows; ++i) load_row(copy[i], source + i * columns, columns);
  return copy;
}

template <typename T, int kRows, int kVectors, bool adds>
inline void multiply_tile(int64_t depth, Factor<T> A, Rows<const T> B, Rows<T> C) {
  using V = Vec<T>;
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) sums[r][c] = adds ? V::loadu(C[r] + c * V::size()) : V(T(0));
  }
  for (int64_t d = 0; d < depth; ++d) {
    V row[kVectors];
    for (int c = 0; c < kVectors; ++c) row[c] = V::loadu(B[d] + c * V::size());
    for (int r = 0; r < kRows; ++r) {
      const V factor(A.data[r * A.row + d * A.column]);
      for (int c = 0; c < kVectors; ++c) sums[r][c] = at::vec::fmadd(factor, row[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) sums[r][c].store(C[r] + c * V::size());
  }
}

constexpr int64_t kTileRows = 4;

template <typename T, int kVectors, bool adds>
void multiply_columns(int64_t rows, int64_t depth, Factor<T> A, Rows<const T> B, Rows<T> C) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) {
    multiply_tile<T, kTileRows, kVectors, adds>(depth, A.from(i, 0), B, C.from(i));
  }
  for (; i < rows; ++i) multiply_tile<T, 1, kVectors, adds>(depth, A.from(i, 0), B, C.from(i));
}

// C = A B, or adds it to C, of `rows` rows of A, and columns of B up to a whole vector. The sum of an element has the order of
// `depth`, whatever the sizes.
template <bool adds = false, typename T>
void multiply(int64_t rows, int64_t columns, int64_t depth, Factor<T> A, Rows<const T> B, Rows<T> C) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kVectors = 4;
#else
  constexpr int kVectors = 2;  // the sums of four rows fill 16 registers otherwise
#endif
  constexpr int64_t kSize = Vec<T>::size();
  int64_t j = 0;
  for (; j + kVectors * kSize <= padded<T>(columns); j += kVectors * kSize) {
    multiply_columns<T, kVectors, adds>(rows, depth, A, B.from(0, j), C.from(0, j));
  }
  for (; j < columns; j += kSize) multiply_columns<T, 1, adds>(rows, depth, A, B.from(0, j), C.from(0, j));
}

// Calls body(first row, rows) for tiles of rows.
template <typename Body>
void for_each_tile(int64_t rows, const Body& body) {
  for (int64_t i = 0; i < rows; i += kTileRows) body(i, std::min(kTileRows, rows - i));
}

// (columns, rows) of (rows, columns), with zeros up to whole vectors of rows. Reads whole vectors of columns.
template <typename T>
void transpose(int64_t rows, int64_t columns, Rows<const T> source, Rows<T> target) {
  constexpr int64_t kSize = Vec<T>::size();
  alignas(64) T square[kSize * kSize];
  for (int64_t i = 0; i < rows; i += kSize) {
    const int64_t count = std::min(kSize, rows - i);
    for (int64_t j = 0; j < columns; j += kSize) {
      const int64_t kept = std::min(kSize, columns - j);
      if (count == kSize && kept == kSize) {
        transpose_square(source[i] + j, source.row, target[j] + i, target.row);
        continue;
      }
      alignas(64) T block[kSize * kSize] = {};
      for (int64_t r = 0; r < count; ++r) std::copy(source[i + r] + j, source[i + r] + j + kept, block + r * kSize);
      transpose_square(block, kSize, square, kSize);
      for (int64_t r = 0; r < kept; ++r) std::copy(square + r * kSize, square + (r + 1) * kSize, target[j + r] + i);
    }
  }
}

template <typename T>
T sum_of(const Vec<T>& values) {
  return at::vec::vec_reduce_all<T>([](Vec<T>& a, Vec<T>& b) { return a + b; }, values);
}

// The first `count` columns, of rows whose other ones are not read.
template <typename T>
T dot(const T* a, const T* b, int64_t count) {
  using V = Vec<T>;
  V sum(T(0));
  int64_t j = 0;
  for (; j + V::size() <= count; j += V::size()) sum = at::vec::fmadd(V::loadu(a + j), V::loadu(b + j), sum);
  if (j < count) sum = at::vec::fmadd(V::loadu(a + j, count - j), V::loadu(b + j, count - j), sum);
  return sum_of<T>(sum);
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule
