// Rows of channels that start at any element, for the linear scan's sequential kernels and plain tiles: their copies to shared
// memory, loads from there and stores, kTileChannels channels at a time.
//
// In the sequential kernels a warp copies a row as the aligned blocks of 16 bytes that hold it. A lane then loads its pair of
// channels, as the aligned pair that holds its first channel and the word after that. It stores its pair as it is, or, in a row
// that starts between pairs, the pair of the last element of the lane before and its own first one; two lanes store the
// elements at the ends.
//
// In plain tiles the lanes of a row copy it as blocks, too, in a ring: the first and the last block share a place. Each lane
// then moves its channels to where an aligned row has them, so that the scan reads both alike. A warp stores the results of its
// lanes from shared memory, row by row, as in the sequential kernels.
//
// Rows whose numbers differ by an even number start equally far from pairs, because two strides are whole pairs. Addresses and
// counts of stores are therefore those of the first two rows.
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

// `steps` rows of a tensor of a plain tile in shared memory, kTileChannels channels each, `distance` bytes apart. A row has
// `lanes` neighboring lanes, of which each has 16 bytes, and as many aligned blocks of 16 bytes and one more: its first and its
// last block share the first place, because the elements of both fill it. Words are aligned, so that in 16-bit types the two
// blocks may share a word: the last block's is kept apart.
template <typename Scalar, int steps, int lanes, int distance>
struct RingRows {
  static constexpr int kBlock = cuda::kCpAsyncBytes, kRowBytes = lanes * kBlock;
  static constexpr bool kHasLast = sizeof(Scalar) < kWordBytes;
  static constexpr int kElements = kBlock / static_cast<int>(sizeof(Scalar));
  using Vector = cuda::Vector<Scalar, kElements>;
  static constexpr int kAtOnce = 2;
  static_assert(kRowBytes == kTileChannels * static_cast<int>(sizeof(Scalar)), "the lanes' blocks are a row");
  static_assert(steps % kAtOnce == 0 && steps <= lanes, "a lane copies the last word of a row");

  // Starts the copies of the first `count` rows; the others become zero. `first` is the first row's first element, of which
  // `channels` exist, up to kTileChannels. `rows` is the row's first place, `last` gets the words that are kept apart.
  static __device__ __forceinline__ void copy(const Scalar* first, int64_t stride, int channels, int count, int lane,
                                              char* rows, uint32_t* last) {
    const int row_bytes = channels * static_cast<int>(sizeof(Scalar)), lane_bytes = lane * kBlock;
    const int64_t row_stride = stride * static_cast<int64_t>(sizeof(Scalar));
    const auto valid = [](int left, int most) { return max(0, min(left, most)); };
    const char* row = reinterpret_cast<const char*>(first);
#pragma unroll 2
    for (int s = 0; s < steps; ++s) {
      const int past = cuda::bytes_past_multiple<kBlock>(row);
      const char* const begin = round_down<kBlock>(row);
      const int left = s < count ? row_bytes + past : 0;  // from `begin` on
      if (lane > 0) cuda::cp_async(rows + s * distance + lane_bytes, begin + lane_bytes, valid(left - lane_bytes, kBlock));
      if (lane < kBlock / kWordBytes) {
        const int word = lane * kWordBytes, from = word + (lane < past / kWordBytes ? kRowBytes : 0);
        cuda::cp_async<kWordBytes>(rows + s * distance + word, begin + from, valid(left - from, kWordBytes));
      }
      row += row_stride;
    }
    if constexpr (kHasLast) {
      if (lane < steps) {
        const char* const own = reinterpret_cast<const char*>(first) + lane * row_stride;
        const int past = cuda::bytes_past_multiple<kBlock>(own), from = kRowBytes + (past & ~(kWordBytes - 1));
        cuda::cp_async<kWordBytes>(&last[lane], round_down<kBlock>(own) + from,
                                   lane < count ? valid(row_bytes + past - from, kWordBytes) : 0);
      }
    }
  }

  // Moves the elements of copied rows to where aligned rows have them. All lanes of the warp call this.
  static __device__ __forceinline__ void shift(const Scalar* first, int64_t stride, int lane, char* rows,
                                               const uint32_t* last) {
    const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first));
    const uint32_t row_stride = static_cast<uint32_t>(stride) * static_cast<uint32_t>(sizeof(Scalar));
    const bool is_last = lane == lanes - 1;
    char *own = rows + lane * kBlock, *next = is_last ? rows : own + kBlock;
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += kAtOnce) {
      Vector vectors[kAtOnce][2];
      uint32_t words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        vectors[i][0] = Vector::load(reinterpret_cast<const Scalar*>(own + i * distance));
        vectors[i][1] = Vector::load(reinterpret_cast<const Scalar*>(next + i * distance));
        if constexpr (kHasLast) words[i] = last[begin + i];
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto past = static_cast<int>(address + (begin + i) * row_stride) & (kBlock - 1);
        const Vector vector = join(vectors[i], past, is_last, kHasLast ? words[i] : 0);
        vector.store(reinterpret_cast<Scalar*>(own + i * distance));
      }
      own += kAtOnce * distance;
      next += kAtOnce * distance;
    }
  }

 private:
  // The vector that starts `past` bytes into the first of two. Its last element is in `last` if replaces_last.
  static __device__ __forceinline__ Vector join(const Vector (&vectors)[2], int past, bool replaces_last, uint32_t last) {
    constexpr int kWords = kBlock / kWordBytes;
    uint32_t words[2 * kWords];
    memcpy(words, vectors, sizeof(words));
    cuda::skip_words<kWords>(words, past);
    if constexpr (kHasLast) {
      words[kWords] = replaces_last ? last : words[kWords];
      const unsigned int selected = (past & 2) != 0 ? 0x5432 : 0x3210;
#pragma unroll
      for (int k = 0; k < kWords; ++k) words[k] = __byte_perm(words[k], words[k + 1], selected);
    }
    Vector vector;
    memcpy(&vector, words, sizeof(vector));
    return vector;
  }
};

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
  // Row s, which is odd if i is 1. Called for each row, in order.
  __device__ __forceinline__ void store_next(int i, int s, const Pair& own, uint32_t before) {
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
