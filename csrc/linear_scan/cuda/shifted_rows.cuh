// Rows of channels that start at any element, for the linear scan's sequential kernels and plain tiles: their copies to shared
// memory and their stores, kTileChannels channels at a time.
//
// A warp, or part of it, copies a row as the aligned words that hold it. In 16-bit types, a row that starts inside a word has
// one word more than an aligned one, and its elements are an element too far back. Each lane then moves its channels to where
// an aligned row has them, so that the scan reads both alike. The sequential kernels store a row as aligned pairs of elements.
// In a row that starts between pairs a lane stores the last element of the lane before with its own first one, and the elements
// at the ends singly.
//
// Rows whose numbers differ by an even number start equally far from pairs, because two strides are whole pairs. Addresses and
// counts are therefore those of the first two rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/launch.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/shifted_io.cuh"
#include "cuda/vector_io.cuh"
#include "linear_scan/cuda/launch.h"

namespace ssm_kernels::linear_scan {

constexpr int kWordBytes = 4;

// Tensor i of those that backward copies: the inputs that it reads, grad_h, and h one step earlier. Fields are selected one by
// one, because they are in the constant bank.
template <int inputs, typename Scalar>
__device__ __forceinline__ SequenceView backward_view(const LinearScanBwdParams& p, int i) {
  const SequenceView& input = p.inputs[i < inputs ? i : 0];
  const auto select = [&](auto of_input, auto of_grad_h, auto of_h) {
    return i < inputs ? of_input : i == inputs ? of_grad_h : of_h;
  };
  SequenceView result;
  result.stride_batch = select(input.stride_batch, p.grad_h.stride_batch, p.h.stride_batch);
  result.stride_step = select(input.stride_step, p.grad_h.stride_step, p.h.stride_step);
  result.data = static_cast<Scalar*>(select(input.data, p.grad_h.data, p.h.data)) - (i > inputs ? p.h.stride_step : 0);
  return result;
}

// The address rounded down to a multiple of `bytes`.
template <int bytes, typename Element>
__device__ __forceinline__ Element* round_down(Element* address) {
  return reinterpret_cast<Element*>(reinterpret_cast<uintptr_t>(address) & ~static_cast<uintptr_t>(bytes - 1));
}

// kSteps rows of a tensor in shared memory, kTileChannels channels each, `distance` bytes apart. `lanes` neighboring lanes copy
// them; each of these reads its part of every row later.
template <typename Scalar, int steps, int lanes = cuda::kWarpSize,
          int distance = kTileChannels * static_cast<int>(sizeof(Scalar))>
struct ShiftedRows {
  static constexpr int kSteps = steps, kRowWords = kTileChannels * static_cast<int>(sizeof(Scalar)) / kWordBytes;
  static constexpr int kLaneWords = kRowWords / lanes;
  static constexpr bool kHasShifts = sizeof(Scalar) < kWordBytes;
  static_assert(sizeof(Scalar) <= kWordBytes && kLaneWords * lanes == kRowWords, "the lanes copy whole rows of words");
  static constexpr int kAtOnce = kSteps < 8 || kLaneWords > 1 ? 2 : 4;  // the loops are short, to compile fast
  static_assert(kAtOnce % 2 == 0 && kSteps % (2 * kAtOnce) == 0, "rows come in twos, and half of them are whole loops");
  static_assert(!kHasShifts || kSteps <= lanes, "a lane copies the last word of a row");

  // Starts the copies of the first `count` rows; the others become zero. `first` is the first row's first element, of which
  // `channels` exist, up to kTileChannels. `last` gets the words that follow the rows.
  static __device__ __forceinline__ void copy(const Scalar* first, int64_t stride, int channels, int count, int lane,
                                              void* rows, uint32_t* last) {
    const int row_bytes = channels * static_cast<int>(sizeof(Scalar));
    const auto valid_bytes = [&](const Scalar* row, int word) {  // of a word, the first of which holds the row's first element
      const int bytes = row_bytes + cuda::bytes_past_multiple<kWordBytes>(row) - word * kWordBytes;
      return max(0, min(bytes, kWordBytes));
    };
    if constexpr (kHasShifts) {
      if (lane < kSteps) {
        const Scalar* const row = first + lane * stride;
        cuda::cp_async<kWordBytes>(&last[lane], word_of(row, kRowWords), lane < count ? valid_bytes(row, kRowWords) : 0);
      }
    }
    const char* from[2];
    int valid[2][kLaneWords];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Scalar* const row = first + i * stride;
      from[i] = word_of(row, lane);
#pragma unroll
      for (int k = 0; k < kLaneWords; ++k) valid[i][k] = valid_bytes(row, lane + k * lanes);
    }
    const int64_t two_strides = 2 * stride * static_cast<int64_t>(sizeof(Scalar));
    char* to = static_cast<char*>(rows) + lane * kWordBytes;
#pragma unroll 1
    for (int begin = 0; begin < kSteps; begin += kAtOnce) {
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
        for (int k = 0; k < kLaneWords; ++k) {
          constexpr int kBytes = lanes * kWordBytes;  // from one of the lane's words to the next
          cuda::cp_async<kWordBytes>(to + k * kBytes, from[s % 2] + k * kBytes, begin + s < count ? valid[s % 2][k] : 0);
        }
        from[s % 2] += two_strides;
        to += distance;
      }
    }
  }

  // Moves the elements of copied rows to where aligned rows have them. A lane moves the part that it reads later, and reads
  // the first word of the next lane from that lane's register. All lanes of the warp call this, with equal shifts.
  static __device__ __forceinline__ void shift(const Scalar* first, int64_t stride, int lane, void* rows,
                                               const uint32_t* last) {
    if constexpr (kHasShifts) {
      const bool is_first = cuda::bytes_past_multiple<kWordBytes>(first) != 0, is_stride = (stride & 1) != 0;
      if (!is_first && !is_stride) return;
      const int between = is_stride ? 2 : 1;
      const auto words_of = [&](int s) {
        return reinterpret_cast<uint32_t*>(static_cast<char*>(rows) + s * distance) + lane * kLaneWords;
      };
#pragma unroll 1
      for (int begin = is_first ? 0 : 1; begin < kSteps; begin += kAtOnce * between) {
        uint32_t words[kAtOnce][kLaneWords + 1];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int s = begin + i * between;
#pragma unroll
          for (int k = 0; k < kLaneWords; ++k) words[i][k] = words_of(s)[k];
          words[i][kLaneWords] = last[s];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const uint32_t of_next_lane = __shfl_down_sync(cuda::kAllLanes, words[i][0], 1);
          if (lane + 1 < lanes) words[i][kLaneWords] = of_next_lane;
#pragma unroll
          for (int k = 0; k < kLaneWords; ++k) {
            words_of(begin + i * between)[k] = __byte_perm(words[i][k], words[i][k + 1], 0x5432);
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ const char* word_of(const Scalar* row, int word) {
    return reinterpret_cast<const char*>(round_down<kWordBytes>(row)) + word * kWordBytes;
  }
};

// Stores the first `count` elements of a vector as aligned words, and those at the ends that share their word singly.
template <typename Element, int size>
__device__ __forceinline__ void store_words(Element* target, const cuda::Vector<Element, size>& vector, int count) {
  constexpr int kWords = size * static_cast<int>(sizeof(Element)) / kWordBytes;
  uint32_t words[kWords + 1] = {};
  memcpy(words, &vector, sizeof(vector));
  if constexpr (sizeof(Element) == kWordBytes) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (k < count) __stcg(reinterpret_cast<uint32_t*>(target) + k, words[k]);
    }
  } else {
    const int skipped = cuda::bytes_past_multiple<kWordBytes>(target) != 0 ? 1 : 0;  // elements
    auto* const first = reinterpret_cast<uint32_t*>(target + skipped);
    uint32_t end = 0;  // the element after the last whole word
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const uint32_t word = __byte_perm(words[k], words[k + 1], skipped != 0 ? 0x5432 : 0x3210);
      if (skipped + 2 * k + 2 <= count) {
        __stcg(first + k, word);
      } else if (skipped + 2 * k + 1 == count) {
        end = word;
      }
    }
    const auto half = [](uint32_t word) {
      const auto bits = static_cast<uint16_t>(word);
      Element element;
      memcpy(&element, &bits, sizeof(element));
      return element;
    };
    if (skipped != 0 && count > 0) target[0] = half(words[0]);
    if ((count - skipped) % 2 == 1) target[count - 1] = half(end);
  }
}

// Stores rows that start at any element, one after another: two channels a lane, of which `channels` exist.
template <typename Element>
struct ShiftedStores {
  using Pair = cuda::Vector<Element, 2>;

  // Holds, for the first two rows, the lane's aligned pair, which in a shifted row begins with an element of the lane before,
  // and what the lane stores.
  char* target[2];
  bool is_shifted[2], has_pair[2], has_first[2], has_second[2];
  int64_t two_strides;

  // `first`: the lane's first element of the first row. `left`: channels from there on.
  __device__ __forceinline__ ShiftedStores(Element* first, int64_t stride, int64_t left, int lane)
      : two_strides(2 * stride * static_cast<int64_t>(sizeof(Element))) {
    const bool has_next = lane + 1 < cuda::kWarpSize && left > 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Element* const row = first + i * stride;
      is_shifted[i] = cuda::bytes_past_multiple<Pair::kBytes>(row) != 0;
      target[i] = reinterpret_cast<char*>(round_down<Pair::kBytes>(row));
      has_pair[i] = is_shifted[i] ? lane > 0 && left >= 1 : left >= 2;
      has_first[i] = is_shifted[i] ? lane == 0 && left >= 1 : left == 1;
      has_second[i] = is_shifted[i] && left >= 2 && !has_next;
    }
  }

  // A row, by all lanes of the warp. Called for each row, in order, with `i` 0 and 1 in turns; rows that do not exist are
  // passed over.
  __device__ __forceinline__ void store_next(int i, bool exists, const Pair& own) {
    auto* const to = reinterpret_cast<Element*>(target[i]);
    const Pair pair = moved(own, is_shifted[i]);
    if (exists) {
      if (has_pair[i]) pair.store_once(to);
      if (has_first[i]) to[is_shifted[i] ? 1 : 0] = own[0];
      if (has_second[i]) to[2] = own[1];
    }
    target[i] += two_strides;
  }

 private:
  // In a shifted row the second element of the lane before and the first one of this lane, else the lane's own.
  static __device__ __forceinline__ Pair moved(const Pair& own, bool is_shifted) {
    uint32_t words[Pair::kBytes / kWordBytes];
    memcpy(words, &own, sizeof(own));
    if constexpr (sizeof(Element) < kWordBytes) {
      words[0] = __byte_perm(__shfl_up_sync(cuda::kAllLanes, words[0], 1), words[0], is_shifted ? 0x5432 : 0x7654);
    } else {
      const uint32_t before = __shfl_up_sync(cuda::kAllLanes, words[1], 1), first = words[0];
      words[0] = is_shifted ? before : first;
      words[1] = is_shifted ? first : words[1];
    }
    Pair pair;
    memcpy(&pair, words, sizeof(pair));
    return pair;
  }
};

}  // namespace ssm_kernels::linear_scan
