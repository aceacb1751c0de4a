// Parts of rows that start at any element, moved by whole warps in aligned accesses of 16 bytes.
//
// A warp copies its segment of a row to shared memory by cp.async, as the aligned pieces of memory that hold it, and then moves
// it to the start of its place there. Later accesses are those of an aligned row. Outputs take the opposite way: lanes write
// their vectors to shared memory, in the place of an input that has been read, and the warp stores the aligned pieces of the
// row. The first and the last elements of a segment are stored singly, by a lane each, because their pieces belong in part to
// other warps or other rows.
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

// The 16 bytes that start `skipped` words, and half a word more with that selector, after the start of `a`; `b` follows it.
template <typename Scalar, int skipped>
__device__ __forceinline__ uint4 join_pieces(const uint4& a, const uint4& b, unsigned int selected) {
  const uint32_t words[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  const auto word = [&](int i) {
    if constexpr (sizeof(Scalar) == 4) return words[skipped + i];
    return __byte_perm(words[skipped + i], words[skipped + i + 1], selected);
  };
  return {word(0), word(1), word(2), word(3)};
}

// The vector that starts `past` bytes after a multiple of 16 bytes in shared memory. `past` is the same for the warp. The 16
// bytes after those of its first element are read, too, and must exist.
template <typename Scalar>
__device__ __forceinline__ Vector<Scalar, kCpAsyncBytes / sizeof(Scalar)> load_pieces(const char* first, int past) {
  const uint4* const pieces = reinterpret_cast<const uint4*>(first);
  const uint4 a = pieces[0], b = pieces[1];
  Vector<Scalar, kCpAsyncBytes / sizeof(Scalar)> vector;
  visit_index<kCpAsyncBytes / 4>(past / 4, [&](auto skipped) {
    const uint4 joined = join_pieces<Scalar, decltype(skipped)::value>(a, b, select_half_words(past));
    memcpy(&vector, &joined, sizeof(joined));
  });
  return vector;
}

// The 16 bytes that begin `skipped` bytes after the start of the lane's vector and end in that of the lane above, which for the
// last lane is `above` of the first. `skipped` is the same for the warp, which calls the function together.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> join_lane_above(const Vector<Scalar, size>& own,
                                                                const Vector<Scalar, size>& above, int skipped) {
  using Values = Vector<Scalar, size>;
  static_assert(Values::kBytes == kCpAsyncBytes, "a vector is a piece");
  const int lane = threadIdx.x % kWarpSize;
  uint32_t words[4], later[4];
  memcpy(words, &own, sizeof(words));
  memcpy(later, &above, sizeof(later));
  Values vector;
  visit_index<kCpAsyncBytes / 4>(skipped / 4, [&](auto index) {
    constexpr int kSkipped = decltype(index)::value, kTaken = kSkipped + (sizeof(Scalar) == 2 ? 1 : 0);
    uint32_t next[4] = {};
#pragma unroll
    for (int k = 0; k < kTaken; ++k) {
      next[k] = __shfl_sync(kAllLanes, lane == 0 ? later[k] : words[k], (lane + 1) % kWarpSize);
    }
    const uint4 joined = join_pieces<Scalar, kSkipped>({words[0], words[1], words[2], words[3]},
                                                       {next[0], next[1], next[2], next[3]}, select_half_words(skipped));
    memcpy(&vector, &joined, sizeof(joined));
  });
  return vector;
}

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
        const uint4 moved = join_pieces<Scalar, kSkipped>(piece[0], piece[1], selected);
        __syncwarp();
        *piece = moved;
      }
    });
  }

  // Stores a segment that begins at its place in shared memory, of which the row has `left` bytes, possibly more than `bytes`
  // or fewer than 0. What the lanes have written there is visible to the warp, which calls the function together.
  static __device__ __forceinline__ void store(void* target, const char* own, int left, int lane) {
    constexpr int kElementBytes = sizeof(Scalar), kEdgeElements = kCpAsyncBytes / kElementBytes;
    static_assert(2 * kEdgeElements <= kWarpSize, "each lane stores at most one element");
    char* const first = static_cast<char*>(target);
    const int count = min(left, bytes), lane_bytes = lane * kCpAsyncBytes;
    // Bytes before the first multiple of 16 bytes in the row, and from there on.
    const int skipped = -bytes_past_multiple<kCpAsyncBytes>(first) & (kCpAsyncBytes - 1);
    const int inner = count - skipped;
    const unsigned int selected = select_half_words(skipped);
    visit_index<kCpAsyncBytes / 4>(skipped / 4, [&](auto index) {
      constexpr int kSkipped = decltype(index)::value;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        if (inner < lane_bytes + k * kWarpBytes + kCpAsyncBytes) continue;
        const uint4* const piece = reinterpret_cast<const uint4*>(own + k * kWarpBytes);
        *reinterpret_cast<uint4*>(first + skipped + lane_bytes + k * kWarpBytes) =
            join_pieces<Scalar, kSkipped>(piece[0], piece[1], selected);
      }
    });
    // Elements before the first whole piece and after the last one, whose 16 bytes belong in part to other warps or rows.
    const int last = inner < 0 ? count : count - inner % kCpAsyncBytes;
    const bool is_first = lane < kEdgeElements;
    const int position = lane * kElementBytes + (is_first ? 0 : last - kCpAsyncBytes);
    if (lane < 2 * kEdgeElements && position < (is_first ? min(skipped, count) : count)) {
      *reinterpret_cast<Scalar*>(first + position) = *reinterpret_cast<const Scalar*>(own - lane_bytes + position);
    }
  }
};

}  // namespace ssm_kernels::cuda
