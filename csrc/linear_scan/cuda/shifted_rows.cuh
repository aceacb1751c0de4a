// Rows of channels that start at any element, for the linear scan's sequential kernels and plain tiles: their copies to shared
// memory, loads from there and stores, kTileChannels channels at a time.
//
// In the sequential kernels a warp copies a row as the aligned blocks of 16 bytes that hold it. A lane then loads its pair of
// channels, as the aligned pair that holds its first channel and the word after that. It stores its pair as it is, or, in a row
// that starts between pairs, the pair of the last element of the lane before and its own first one; two lanes store the
// elements at the ends.
//
// In plain tiles the lanes of a row copy it as the aligned words that hold it. In 16-bit types, a row that starts inside a word
// has one word more than an aligned one, and its elements are an element too far back. Each lane then moves its channels to
// where an aligned row has them, so that the scan reads both alike.
//
// Rows whose numbers differ by an even number start equally far from pairs, because two strides are whole pairs. Addresses and
// counts of stores and of copied words are therefore those of the first two rows.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/opaque.cuh"
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

// kSteps rows of a tensor of a plain tile in shared memory, kTileChannels channels each, `distance` bytes apart. `lanes`
// neighboring lanes copy them; each of these reads its part of every row later.
template <typename Scalar, int steps, int lanes, int distance>
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

// steps rows of a tensor for a warp of the sequential kernels, kTileChannels channels each, as the aligned blocks of
// kCpAsyncBytes that hold them: one more than an aligned row has. A lane then loads its two channels of each row from there.
template <typename Scalar, int steps>
struct ShiftedBlocks {
  using Pair = cuda::Vector<Scalar, 2>;
  static constexpr int kBytes = kTileChannels * static_cast<int>(sizeof(Scalar));
  static constexpr int kRowBytes = kBytes + cuda::kCpAsyncBytes;  // in shared memory
  static constexpr int kLanesOfRow = kBytes / cuda::kCpAsyncBytes, kRowsAtOnce = cuda::kWarpSize / kLanesOfRow;
  static_assert(sizeof(Scalar) == 2 || sizeof(Scalar) == 4, "a word holds one or two elements");
  static_assert(kRowsAtOnce >= 1 && steps % kRowsAtOnce == 0, "a warp copies whole groups of rows");
  static_assert(steps <= cuda::kWarpSize, "a lane copies the last block of a row");

  // Starts the copies of the first `count` rows; the others become zero. `first` is the first row's first element, of which
  // `channels` exist, up to kTileChannels.
  static __device__ __forceinline__ void copy(const Scalar* first, int64_t stride, int channels, int count, int lane,
                                              unsigned char* rows) {
    const int row = lane / kLanesOfRow, skipped = lane % kLanesOfRow * cuda::kCpAsyncBytes;
    const int row_bytes = channels * static_cast<int>(sizeof(Scalar));
    const int64_t row_stride = stride * static_cast<int64_t>(sizeof(Scalar));
    const auto of_row = [&](int s, int bytes) { return s < count ? row_bytes - bytes : -cuda::kCpAsyncBytes; };
    const char* const begin = reinterpret_cast<const char*>(first);
    const char* from = begin + row * row_stride + skipped;
    unsigned char* const to = rows + row * kRowBytes + skipped;
#pragma unroll
    for (int s = 0; s < steps; s += kRowsAtOnce) {
      cuda::cp_async_block<false>(to + s * kRowBytes, from, of_row(s + row, skipped));
      from += kRowsAtOnce * row_stride;
    }
    if (lane < steps) {
      cuda::cp_async_block<false>(rows + lane * kRowBytes + kBytes, begin + lane * row_stride + kBytes, of_row(lane, kBytes));
    }
  }

  // Loads the lane's channels of `count` rows from row `begin` on. If all rows start at pairs of elements, reads_pairs saves a
  // load of each.
  template <int count>
  static __device__ __forceinline__ void load(const Scalar* first, int64_t stride, int lane, const unsigned char* rows,
                                              bool reads_pairs, int begin, Pair (&pairs)[count]) {
    const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first));
    const uint32_t row_stride = cuda::opaque(static_cast<uint32_t>(stride)) * static_cast<uint32_t>(sizeof(Scalar));
    const unsigned char* const own = rows + cuda::opaque(lane) * Pair::kBytes;
#pragma unroll
    for (int s = 0; s < count; ++s) {
      const uint32_t past = address + (begin + s) * row_stride;  // and a multiple of kCpAsyncBytes
      const unsigned char* const source = own + (begin + s) * kRowBytes + (past & (cuda::kCpAsyncBytes - Pair::kBytes));
      pairs[s] = Pair::load(reinterpret_cast<const Scalar*>(source));
      uint32_t next = 0;
      if (!reads_pairs) next = *reinterpret_cast<const uint32_t*>(source + Pair::kBytes);
      uint32_t words[Pair::kBytes / kWordBytes];
      memcpy(words, &pairs[s], sizeof(words));
      if constexpr (sizeof(Scalar) < kWordBytes) {
        words[0] = __funnelshift_r(words[0], next, past * 8);  // by the last five bits: 0 or 16
      } else {
        const bool skips_word = (past & kWordBytes) != 0;
        words[0] = skips_word ? words[1] : words[0];
        words[1] = skips_word ? next : words[1];
      }
      memcpy(&pairs[s], words, sizeof(words));
    }
  }
};

// Stores rows that start at any element, one after another: two channels a lane, of `count` in a row. In a row that starts
// between pairs, a lane stores the last element of the lane before with its own first one as an aligned pair, and two lanes
// store the elements at the ends: lane 0, and the lane after the last element or, in a full row, the last lane.
template <typename Element>
struct ShiftedStores {
  using Pair = cuda::Vector<Element, 2>;
  static constexpr int kWords = Pair::kBytes / kWordBytes;

  // For the first two rows: the lane's aligned pair, which in a shifted row begins with an element of the lane before, and of
  // how many rows the lane stores the pair and an element.
  char* target[2];
  unsigned int single_bytes[2];  // from the pair to the element that is stored singly
  bool is_shifted[2];
  int pair_rows[2], single_rows[2];
  bool takes_before, takes_second;  // which element that is: the last of the lane before, the lane's second, else its first
  int64_t two_strides;

  // `first`: lane 0's first element of the first row.
  __device__ __forceinline__ ShiftedStores(Element* first, int64_t stride, int count, int rows, int lane)
      : two_strides(2 * stride * static_cast<int64_t>(sizeof(Element))) {
    const int channel = 2 * lane;
    takes_second = count == kTileChannels && channel + 2 == kTileChannels;
    takes_before = count % 2 == 0 && lane > 0 && channel == count;
    const int single = takes_second ? 1 : takes_before ? -1 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Element* const own = first + i * stride + channel;
      is_shifted[i] = cuda::bytes_past_multiple<Pair::kBytes>(own) != 0;
      const int moved = is_shifted[i] ? 1 : 0;
      target[i] = reinterpret_cast<char*>(round_down<Pair::kBytes>(own));
      single_bytes[i] = static_cast<unsigned int>(single + moved) * static_cast<unsigned int>(sizeof(Element));
      pair_rows[i] = (is_shifted[i] ? lane > 0 && channel < count : channel + 1 < count) ? rows : 0;
      single_rows[i] = (is_shifted[i] ? lane == 0 || takes_second || takes_before : channel + 1 == count) ? rows : 0;
    }
  }

  // The last word of the lane before. All lanes of the warp call this.
  static __device__ __forceinline__ uint32_t before(const Pair& own) {
    uint32_t words[kWords];
    memcpy(words, &own, sizeof(words));
    return __shfl_up_sync(cuda::kAllLanes, words[kWords - 1], 1);
  }
  // Row s. Called for each row, in order.
  __device__ __forceinline__ void store_next(int s, const Pair& own, uint32_t before) {
    const int i = s % 2;
    uint32_t words[kWords];
    memcpy(words, &own, sizeof(words));
    Pair pair;
    uint32_t single;  // in its lowest bytes
    if constexpr (sizeof(Element) < kWordBytes) {
      const uint32_t moved = __byte_perm(before, words[0], is_shifted[i] ? 0x5432 : 0x7654);
      memcpy(&pair, &moved, sizeof(pair));
      single = __byte_perm(before, words[0], takes_second ? 0x7676 : takes_before ? 0x3232 : 0x5454);
    } else {
      const uint32_t moved[2] = {is_shifted[i] ? before : words[0], is_shifted[i] ? words[0] : words[1]};
      memcpy(&pair, moved, sizeof(pair));
      single = takes_second ? words[1] : takes_before ? before : words[0];
    }
    if (s < pair_rows[i]) pair.store_once(reinterpret_cast<Element*>(target[i]));
    if (s < single_rows[i]) {
      using Bits = std::conditional_t<sizeof(Element) == kWordBytes, uint32_t, uint16_t>;
      __stcg(reinterpret_cast<Bits*>(target[i] + single_bytes[i]), static_cast<Bits>(single));
    }
    target[i] += two_strides;
  }
};

}  // namespace ssm_kernels::linear_scan
