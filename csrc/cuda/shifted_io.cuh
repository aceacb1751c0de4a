// Vectors at addresses that are multiples of their element's size only, of 2 or 4 bytes.
//
// A shifted vector is loaded as the aligned pieces of memory that hold it, and a byte permutation moves its elements to the
// front. It is stored as its aligned words, and in a row of 2-byte elements that starts inside a word also a first and a last
// element.
#pragma once

#include "cuda/constants.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/vector_io.cuh"

namespace ssm_kernels::cuda {

constexpr int kPieceBytes = 8;  // of the loads that a shifted vector is made of

// Bytes between an address and the last multiple of `bytes`, a power of two.
template <int bytes>
__device__ __forceinline__ int bytes_past_multiple(const void* address) {
  static_assert((bytes & (bytes - 1)) == 0, "the remainder is a mask");
  return static_cast<int>(reinterpret_cast<uintptr_t>(address)) & (bytes - 1);
}

// Starts the copy of an aligned block of kCpAsyncBytes: the one that holds the byte at `first`, or the next one. Only the part
// of the block before the byte at first + bytes is read; zeros follow it. `bytes` may be negative.
template <bool is_next>
__device__ __forceinline__ void cp_async_block(void* shared, const void* first, int bytes) {
  const int past = bytes_past_multiple<kCpAsyncBytes>(first), skipped = is_next ? kCpAsyncBytes : 0;
  const int valid = max(0, min(past + bytes - skipped, kCpAsyncBytes));
  cp_async(shared, static_cast<const char*>(first) - past + skipped, valid);
}

// The vector that starts `past` bytes into the pieces.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> shift_vector(const uint2 (&pieces)[size * sizeof(Scalar) / kPieceBytes + 1],
                                                             int past) {
  static_assert(sizeof(Scalar) == 2 || sizeof(Scalar) == 4, "words hold one or two elements");
  static_assert(size * sizeof(Scalar) % kPieceBytes == 0, "the pieces are whole, but for the shift");
  constexpr bool kIsHalfWord = sizeof(Scalar) == 2;
  constexpr int kWords = size * static_cast<int>(sizeof(Scalar)) / 4, kNeeded = kWords + (kIsHalfWord ? 1 : 0);
  const auto word = [&](int k) { return k % 2 == 0 ? pieces[k / 2].x : pieces[k / 2].y; };
  const bool skips_word = (past & 4) != 0;
  uint32_t words[kNeeded];
#pragma unroll
  for (int k = 0; k < kNeeded; ++k) words[k] = skips_word ? word(k + 1) : word(k);
  if constexpr (kIsHalfWord) {
    const unsigned int selected = (past & 2) != 0 ? 0x5432 : 0x3210;
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = __byte_perm(words[k], words[k + 1], selected);
  }
  Vector<Scalar, size> vector;
  memcpy(&vector, words, sizeof(vector));
  return vector;
}

// Loads from shared memory the vector that starts `past` bytes after `block`, a multiple of kPieceBytes. Pieces that hold none
// of its elements are read, too, and must exist.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> load_shifted_shared(const char* block, int past) {
  constexpr int kPieces = size * static_cast<int>(sizeof(Scalar)) / kPieceBytes + 1;
  const auto* const source = reinterpret_cast<const uint2*>(block + (past & ~(kPieceBytes - 1)));
  uint2 pieces[kPieces];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) pieces[k] = source[k];
  return shift_vector<Scalar, size>(pieces, past);
}

// A vector from global memory whose loads may still be in flight: vector() waits for them. `count` of its elements exist, or
// more in the same row; the others are zeros. Pieces may begin before the row, in the same 16 bytes as its first element, but
// never extend past its end. They are read through the L1 cache: neighboring lanes read the same sectors.
template <typename Scalar, int size>
struct ShiftedLoad {
  static constexpr int kPieces = size * static_cast<int>(sizeof(Scalar)) / kPieceBytes + 1;
  static constexpr int kPieceElements = kPieceBytes / static_cast<int>(sizeof(Scalar));

  uint2 pieces[kPieces] = {};
  int past = 0;

  __device__ __forceinline__ ShiftedLoad() {}
  __device__ __forceinline__ ShiftedLoad(const Scalar* source, int count) {
    if (count >= size + kPieceElements - 1) {
      past = bytes_past_multiple<kPieceBytes>(source);
      const auto* const first = reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(source) - past);
#pragma unroll
      for (int k = 0; k < kPieces - 1; ++k) pieces[k] = __ldca(first + k);
      if (past != 0) pieces[kPieces - 1] = __ldca(first + kPieces - 1);
    } else {
      auto elements = Vector<Scalar, size>::zero();
#pragma unroll
      for (int j = 0; j < size; ++j) {
        if (j < count) elements.set(j, source[j]);
      }
      memcpy(pieces, &elements, sizeof(elements));
    }
  }
  __device__ __forceinline__ Vector<Scalar, size> vector() const { return shift_vector<Scalar, size>(pieces, past); }
};

// The same without branches, so that the loads of several vectors are in flight together. Elements that do not exist have any
// value: a piece is read if it holds an element that exists, and may extend past the row's end, in the same kPieceBytes.
template <typename Scalar, int size>
struct ShiftedPieces {
  static constexpr int kPieces = size * static_cast<int>(sizeof(Scalar)) / kPieceBytes + 1;

  uint2 pieces[kPieces] = {};
  int past = 0;

  __device__ __forceinline__ ShiftedPieces() {}
  __device__ __forceinline__ ShiftedPieces(const Scalar* source, int count) : past(bytes_past_multiple<kPieceBytes>(source)) {
    const auto* const first = reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(source) - past);
    const int end = past + min(count, size) * static_cast<int>(sizeof(Scalar));
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      if (count > 0 && k * kPieceBytes < end) pieces[k] = __ldca(first + k);
    }
  }
  // A vector that is complete.
  __device__ __forceinline__ explicit ShiftedPieces(const Vector<Scalar, size>& vector) {
    memcpy(pieces, &vector, sizeof(vector));
  }
  __device__ __forceinline__ Vector<Scalar, size> vector() const { return shift_vector<Scalar, size>(pieces, past); }
};

// Stores the first `count` elements of a vector in global memory, or all of them.
template <typename Scalar, int size>
__device__ __forceinline__ void store_shifted(Scalar* target, const Vector<Scalar, size>& vector, int count) {
  static_assert(sizeof(Scalar) == 2 || sizeof(Scalar) == 4, "words hold one or two elements");
  constexpr int kWords = size * static_cast<int>(sizeof(Scalar)) / 4;
  if (count < size) {
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if (j < count) target[j] = vector[j];
    }
    return;
  }
  uint32_t words[kWords];
  memcpy(words, &vector, sizeof(words));
  if constexpr (sizeof(Scalar) == 2) {
    // All words but the last start one element later in an odd row, so that only the last differs between the rows of a warp.
    const bool is_odd = bytes_past_multiple<4>(target) != 0;
    const unsigned int selected = is_odd ? 0x5432 : 0x3210;
    auto* const first = reinterpret_cast<uint32_t*>(target + (is_odd ? 1 : 0));
#pragma unroll
    for (int k = 0; k < kWords - 1; ++k) __stcg(first + k, __byte_perm(words[k], words[k + 1], selected));
    if (is_odd) {
      target[0] = vector[0];
      target[size - 1] = vector[size - 1];
    } else {
      __stcg(first + kWords - 1, words[kWords - 1]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kWords; ++k) __stcg(reinterpret_cast<uint32_t*>(target) + k, words[k]);
  }
}

// Moves the words that start bytes / 4 < count words into the array to its front. The first count + 1 become valid.
template <int count>
__device__ __forceinline__ void skip_words(uint32_t (&words)[2 * count], int bytes) {
  static_assert((count & (count - 1)) == 0, "skipped words are the sum of distances that are powers of two");
#pragma unroll
  for (int distance = count / 2; distance > 0; distance /= 2) {
    const bool skips = (bytes & 4 * distance) != 0;
#pragma unroll
    for (int k = 0; k < count + distance; ++k) words[k] = skips ? words[k + distance] : words[k];
  }
}

// The vector that starts `skipped` < size elements into `first`, followed by `second`.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> join_vectors(const Vector<Scalar, size>& first,
                                                             const Vector<Scalar, size>& second, int skipped) {
  static_assert(sizeof(Scalar) == 2 || sizeof(Scalar) == 4, "words hold one or two elements");
  constexpr int kBytes = size * static_cast<int>(sizeof(Scalar)), kWords = kBytes / 4;
  const int bytes = skipped * static_cast<int>(sizeof(Scalar));
  uint32_t words[2 * kWords];
  memcpy(words, &first, kBytes);
  memcpy(words + kWords, &second, kBytes);
  skip_words<kWords>(words, bytes);
  if constexpr (sizeof(Scalar) == 2) {
    const unsigned int selected = (bytes & 2) != 0 ? 0x5432 : 0x3210;
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = __byte_perm(words[k], words[k + 1], selected);
  }
  Vector<Scalar, size> vector;
  memcpy(&vector, words, kBytes);
  return vector;
}

// Stores elements [begin, end) of a vector singly.
template <typename Scalar, int size>
__device__ __forceinline__ void store_range(Scalar* target, const Vector<Scalar, size>& vector, int begin, int end) {
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (begin <= i && i < end) target[i] = vector[i];
  }
}

}  // namespace ssm_kernels::cuda
