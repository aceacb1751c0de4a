// Parts of rows that start at any element, moved by whole warps in aligned accesses of 16 bytes.
//
// A warp copies its segment of a row to shared memory by cp.async, as the aligned pieces of memory that hold it, and then moves
// it to the start of its place there. Later accesses are those of an aligned row. To store vectors of its lanes, each lane
// takes the end of the previous lane's vector by shuffles and stores the aligned piece that the two vectors share. The first
// and the last elements of a warp's vectors are stored singly, because their pieces belong in part to other warps or other
// rows.
#pragma once

#include <type_traits>

#include "cuda/constants.h"
#include "cuda/shifted_io.cuh"

namespace ssm_kernels::cuda {

// Calls function(std::integral_constant<int, index>()) for an index below `count`. With an index that is the same for the warp,
// registers can be chosen by a branch instead of by selections.
template <int count, typename Function>
__device__ __forceinline__ void visit_index(int index, const Function& function) {
  if constexpr (count == 1) {
    function(std::integral_constant<int, 0>());
  } else if (index == count - 1) {
    function(std::integral_constant<int, count - 1>());
  } else {
    visit_index<count - 1>(index, function);
  }
}

// Selector of __byte_perm for words that start `past` bytes, a multiple of 2, after a pair of words.
__device__ __forceinline__ unsigned int select_half_words(int past) { return (past & 2) != 0 ? 0x5432 : 0x3210; }

// `bytes` consecutive bytes of a row of elements of type Scalar, which a warp copies to shared memory.
template <typename Scalar, int bytes>
struct ShiftedSegment {
  static_assert(sizeof(Scalar) == 2 || sizeof(Scalar) == 4, "words hold one or two elements");
  static constexpr int kWarpBytes = kWarpSize * kCpAsyncBytes, kPieces = bytes / kWarpBytes;
  static_assert(bytes % kWarpBytes == 0, "all lanes copy equally many pieces");
  static constexpr int kBytes = bytes + kCpAsyncBytes;  // in shared memory

  // Starts the copy of a segment that begins at `first` and of which the row has `left` bytes, possibly more than `bytes` or
  // fewer than 0; zeros follow them. The bytes before `first` in its 16 bytes are read, too. `own` is the lane's first piece in
  // shared memory, 16 bytes after the previous lane's.
  static __device__ __forceinline__ void copy(char* own, const void* first, int left, int lane) {
    const int past = bytes_past_multiple<kCpAsyncBytes>(first), lane_bytes = lane * kCpAsyncBytes;
    const char* const source = static_cast<const char*>(first) - past + lane_bytes;
    const int valid = left + past - lane_bytes;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      cp_async(own + k * kWarpBytes, source + k * kWarpBytes, max(0, min(valid - k * kWarpBytes, kCpAsyncBytes)));
    }
    if (lane == 0 && past != 0) cp_async(own + bytes, source + bytes, max(0, min(valid - bytes, kCpAsyncBytes)));
  }

  // Moves a segment that starts `past` bytes into its pieces to their start. The copy is complete and visible to the warp,
  // which calls the function together. A lane may then read its own pieces, 512 bytes apart, and after a barrier those of
  // others.
  static __device__ __forceinline__ void align(char* own, int past) {
    if (past == 0) return;
    const unsigned int selected = select_half_words(past);
    visit_index<kCpAsyncBytes / 4>(past / 4, [&](auto skipped) {
      constexpr int kSkipped = decltype(skipped)::value;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        uint4* const piece = reinterpret_cast<uint4*>(own + k * kWarpBytes);
        const uint4 a = piece[0], b = piece[1];
        const uint32_t words[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const auto word = [&](int i) {
          if constexpr (sizeof(Scalar) == 4) return words[kSkipped + i];
          return __byte_perm(words[kSkipped + i], words[kSkipped + i + 1], selected);
        };
        const uint4 moved = {word(0), word(1), word(2), word(3)};
        __syncwarp();
        *piece = moved;
      }
    });
  }
};

// Stores the vectors of a warp's lanes, which follow each other in a row: lane l's begins at `target`, `size` l elements after
// lane 0's. From there on the row has `count` elements, possibly more than `size` or fewer than 0. The warp calls the function
// together.
template <typename Scalar, int size>
__device__ __forceinline__ void store_shifted_by_warp(Scalar* target, const Vector<Scalar, size>& vector, int count, int lane) {
  using Values = Vector<Scalar, size>;
  constexpr int kBytes = Values::kBytes, kWords = kBytes / 4;
  static_assert(sizeof(Scalar) == 2 || sizeof(Scalar) == 4, "words hold one or two elements");
  if constexpr (Values::kAccesses > 1) return store_shifted(target, vector, count);
  static_assert(kWords > 1, "a vector has 8 bytes or more");
  const int past = bytes_past_multiple<kBytes>(target);
  // Elements before the boundary between two pieces.
  const int boundary = size - past / static_cast<int>(sizeof(Scalar));
  bool stores_first = past == 0, stores_last = stores_first;
  if (past == 0) {
    if (count >= size) {
      vector.store(target);
      return;
    }
  } else {
    uint32_t words[2 * kWords];
    memcpy(words + kWords, &vector, kBytes);
    visit_index<kWords>((past + 3) / 4 - 1, [&](auto index) {
      constexpr int kTaken = decltype(index)::value + 1;  // words of the previous lane
#pragma unroll
      for (int k = kWords - kTaken; k < kWords; ++k) words[k] = __shfl_up_sync(kAllLanes, words[kWords + k], 1);
      const unsigned int selected = select_half_words(past);
      uint32_t shifted[kWords];
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const uint32_t word = words[kWords - kTaken + k];
        shifted[k] = sizeof(Scalar) == 4 ? word : __byte_perm(word, words[kWords - kTaken + k + 1], selected);
      }
      Values piece;
      memcpy(&piece, shifted, kBytes);
      if (lane != 0 && count >= boundary) piece.store(target - (size - boundary));
    });
    stores_first = lane == 0 || count < boundary;
    stores_last = lane == kWarpSize - 1 || count < size + boundary;
    if (!stores_first && !stores_last) return;
  }
#pragma unroll
  for (int j = 0; j < size; ++j) {
    if (j < count && (j < boundary ? stores_first : stores_last)) target[j] = vector[j];
  }
}

}  // namespace ssm_kernels::cuda
