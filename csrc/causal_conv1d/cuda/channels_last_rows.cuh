// How lanes of the channels-last kernels read and write rows, the channels of one step: a warp has kWarpSize * kLaneChannels
// neighboring channels.
//
// Aligned rows start at multiples of a lane's vector, kLaneChannels neighboring channels, which one instruction moves.
//
// Shifted rows start at any element, each step at another one if the stride is odd. There a lane owns every kWarpSize-th
// channel of the warp, so that an instruction for one channel of each lane still moves neighboring elements. The warp copies a
// row to shared memory in aligned pieces of a vector's size, one more than lanes, of which none lies outside of the row: every
// piece that is read holds an element of it. Lanes then take their elements out of pieces that other lanes have copied, after
// __syncwarp(). Results are stored one element at a time. The channels that a lane owns change no result: forward and backward
// add along the steps only.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/taps.cuh"
#include "cuda/index_math.cuh"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace ssm_kernels::causal_conv1d {

// A lane's part in the copies of shifted rows, the same for all tensors. The compiler would compute it again for each copy if
// it were not opaque.
template <typename Scalar>
struct ShiftedLane {
  static constexpr int kBytes = static_cast<int>(sizeof(Scalar)), kPieceBytes = kLaneChannels * kBytes;
  static constexpr int kRowBytes = (kWarpSize + 1) * kPieceBytes;

  int channels;               // of the warp, from the lane's first one on
  int copied, read;           // bytes from a stage to the lane's piece, and to its first channel in an aligned row
  int least_past, next_past;  // the lane copies its piece, and the last lane the next one, in rows that start more bytes past
                              // a piece's begin

  __device__ __forceinline__ ShiftedLane(const ConvParams& p, int64_t first_channel) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    constexpr int kChannels = kWarpSize * kLaneChannels;
    const int64_t left = p.channels - first_channel;
    const int count = static_cast<int>(left < kChannels ? left : kChannels);
    channels = count - lane;
    copied = cuda::opaque(warp * kRowBytes + lane * kPieceBytes);
    read = cuda::opaque(warp * kRowBytes + lane * kBytes);
    least_past = cuda::opaque(lane * kPieceBytes - count * kBytes);
    next_past = cuda::opaque(lane == kWarpSize - 1 ? kWarpSize * kPieceBytes - count * kBytes : kPieceBytes);
  }
};

// A warp's segment, steps [t, end) of entry b, and a lane's first channel. Its next ones are kDistance apart.
template <typename Scalar, bool is_shifted>
struct ChannelsLastSegment {
  static constexpr int kDistance = is_shifted ? kWarpSize : 1, kChannels = kWarpSize * kLaneChannels;

  int64_t b, c;
  int t, end;
  bool has_channels;
  std::conditional_t<is_shifted, ShiftedLane<Scalar>, std::false_type> shifted;

  __device__ __forceinline__ ChannelsLastSegment(const ConvParams& p, const Tiling& tiling) : shifted(make_shifted(p, tiling)) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned channel_blocks = static_cast<unsigned>(tiling.channel_blocks);
    const unsigned tiles = static_cast<unsigned>(tiling.tiles), tile = blockIdx.x / channel_blocks;
    const int64_t channel_block = blockIdx.x - tile * channel_blocks;
    b = tile / tiles;
    const int64_t first = ((tile - tile / tiles * tiles) * int64_t(kWarps) + warp) * tiling.steps;
    t = static_cast<int>(first < p.seqlen ? first : p.seqlen);
    end = static_cast<int>(first + tiling.steps < p.seqlen ? first + tiling.steps : p.seqlen);
    c = is_shifted ? channel_block * kChannels + lane : (channel_block * kWarpSize + lane) * kLaneChannels;
    // The lanes of shifted rows work together, those without channels, too.
    has_channels = is_shifted || c < p.channels;
  }

  __device__ __forceinline__ static auto make_shifted(const ConvParams& p, const Tiling& tiling) {
    if constexpr (is_shifted) {
      return ShiftedLane<Scalar>(p, int64_t(blockIdx.x % static_cast<unsigned>(tiling.channel_blocks)) * kChannels);
    } else {
      return std::false_type();
    }
  }

  // Channel i of the lane; has_channel() is false if the tensor ends before it.
  __device__ __forceinline__ int64_t channel(int i) const { return c + i * kDistance; }
  __device__ __forceinline__ bool has_channel(const ConvParams& p, int i) const {
    return !is_shifted || channel(i) < p.channels;
  }
};

// A lane's channels in aligned rows. The address of a row takes one 32-bit multiplication; choose_kernels excludes tensors
// whose offsets need more.
template <typename Scalar>
class AlignedRows {
 public:
  using Row = cuda::Vector<std::remove_const_t<Scalar>, kLaneChannels>;
  // A row of each warp in shared memory. Each lane reads what it copied itself.
  struct Stage {
    Row rows[kWarpSize * kWarps];
  };

  __device__ __forceinline__ AlignedRows(const SequenceView& view, const ConvParams&,
                                         const ChannelsLastSegment<std::remove_const_t<Scalar>, false>& segment)
      : base_(reinterpret_cast<Bytes*>(static_cast<Scalar*>(view.data) + view.offset(segment.b, 0, segment.c))),
        stride_(static_cast<int>(view.stride_step * static_cast<int64_t>(sizeof(Scalar)))) {}

  __device__ __forceinline__ Scalar* at(int t) const { return reinterpret_cast<Scalar*>(cuda::add_product(base_, t, stride_)); }
  // Bypasses the L1 cache.
  __device__ __forceinline__ Row load_once(int t) const { return Row::load_once(at(t)); }
  __device__ __forceinline__ Row load(int t) const { return Row::load(at(t)); }
  // Starts a copy into shared memory, and reads it after its end.
  __device__ __forceinline__ void start_copy(int t, Stage& target) const {
    cuda::cp_async<Row::kBytes>(&target.rows[threadIdx.x], at(t));
  }
  __device__ __forceinline__ static void stage_zero(Stage& target) { target.rows[threadIdx.x] = Row::zero(); }
  __device__ __forceinline__ Row staged(int, const Stage& stage) const { return stage.rows[threadIdx.x]; }
  template <typename Acc>
  __device__ __forceinline__ void store(int t, const Acc (&values)[kLaneChannels]) const {
    Row::round(values).store_once(at(t));
  }
  __device__ __forceinline__ void store_zero(int t) const { Row::zero().store_once(at(t)); }

  // Between copies into a stage and reads of it, either way.
  __device__ __forceinline__ static void sync() {}

 private:
  using Bytes = std::conditional_t<std::is_const_v<Scalar>, const char, char>;
  Bytes* base_;
  int stride_;
};

// A lane's channels in shifted rows.
template <typename Scalar>
class ShiftedRows {
  using Element = std::remove_const_t<Scalar>;
  using Lane = ShiftedLane<Element>;
  static constexpr int kBytes = Lane::kBytes, kPieceBytes = Lane::kPieceBytes;

 public:
  struct Row {
    AccumulateType<Element> values[kLaneChannels];

    __device__ __forceinline__ AccumulateType<Element> accumulate(int i) const { return values[i]; }
  };
  struct Stage {
    alignas(cuda::kVectorBytes) char bytes[kWarps * Lane::kRowBytes];
  };

  __device__ __forceinline__ ShiftedRows(const SequenceView& view, const ConvParams&,
                                         const ChannelsLastSegment<Element, true>& segment)
      : lane_(segment.shifted), stride_(static_cast<int>(view.stride_step * kBytes)) {
    const int lane = threadIdx.x % kWarpSize;
    const auto* const first = static_cast<const char*>(view.data) + view.offset(segment.b, 0, segment.c - lane) * kBytes;
    base_ = const_cast<Bytes*>(first) + lane * kLaneBytes;
  }

  __device__ __forceinline__ Row load_once(int t) const {
    return load(t, [](const Element* source) { return cuda::Vector<Element, 1>::load_once(source); });
  }
  __device__ __forceinline__ Row load(int t) const {
    return load(t, [](const Element* source) { return cuda::Vector<Element, 1>::load(source); });
  }
  __device__ __forceinline__ void start_copy(int t, Stage& target) const {
    const auto address = reinterpret_cast<uintptr_t>(cuda::add_product(base_, t, stride_));
    const int past = static_cast<int>(address) & (kPieceBytes - 1);
    const auto* const source = reinterpret_cast<const char*>(address & ~static_cast<uintptr_t>(kPieceBytes - 1));
    // Outside of the branches, so that the compiler converts the stage's address once.
    const uint32_t piece = cuda::shared_address(target.bytes) + lane_.copied;
    if (past > lane_.least_past) cuda::cp_async<kPieceBytes>(piece, source);
    if (past > lane_.next_past) cuda::cp_async<kPieceBytes>(piece + kPieceBytes, source + kPieceBytes);
  }
  __device__ __forceinline__ void stage_zero(Stage& target) const {
    using Piece = cuda::Vector<Element, kLaneChannels>;
    char* const piece = target.bytes + lane_.copied;
    *reinterpret_cast<Piece*>(piece) = Piece::zero();
    if (threadIdx.x % kWarpSize == kWarpSize - 1) *reinterpret_cast<Piece*>(piece + kPieceBytes) = Piece::zero();
  }
  __device__ __forceinline__ Row staged(int t, const Stage& stage) const {
    const int past = (static_cast<int>(reinterpret_cast<uintptr_t>(base_)) + t * stride_) & (kPieceBytes - 1);
    const char* const source = stage.bytes + (lane_.read + past);
    Row row;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      row.values[i] = to_accumulate(*reinterpret_cast<const Element*>(source + i * kWarpSize * kBytes));
    }
    return row;
  }
  template <typename Acc>
  __device__ __forceinline__ void store(int t, const Acc (&values)[kLaneChannels]) const {
    static_assert(!std::is_const_v<Scalar>, "inputs are not written");
    const auto rounded = cuda::Vector<Element, kLaneChannels>::round(values);
    auto* const target = reinterpret_cast<Element*>(cuda::add_product(base_, t, stride_));
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      auto element = cuda::Vector<Element, 1>::zero();
      element.set(0, rounded[i]);
      if (i * kWarpSize < lane_.channels) element.store_once(target + i * kWarpSize);
    }
  }
  __device__ __forceinline__ void store_zero(int t) const {
    const AccumulateType<Element> zeros[kLaneChannels] = {};
    store(t, zeros);
  }

  __device__ __forceinline__ static void sync() { __syncwarp(); }

 private:
  // Inputs are copied in pieces, results stored one element a lane.
  static constexpr int kLaneBytes = std::is_const_v<Scalar> ? kPieceBytes : kBytes;

  template <typename Load>
  __device__ __forceinline__ Row load(int t, const Load& load) const {
    const int lane = threadIdx.x % kWarpSize;
    const auto* const row = cuda::add_product(base_, t, stride_) - lane * (kLaneBytes - kBytes);
    const auto* const source = reinterpret_cast<const Element*>(row);
    Row result;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      result.values[i] =
          i * kWarpSize < lane_.channels ? load(source + i * kWarpSize).accumulate(0) : AccumulateType<Element>(0);
    }
    return result;
  }

  using Bytes = std::conditional_t<std::is_const_v<Scalar>, const char, char>;
  Lane lane_;
  Bytes* base_;
  int stride_;
};

template <typename Scalar, bool is_shifted>
using ChannelsLastRows = std::conditional_t<is_shifted, ShiftedRows<Scalar>, AlignedRows<Scalar>>;

template <typename Acc, typename Row, int vector>
__device__ __forceinline__ void to_channels(const Row& row, Acc (&channels)[vector]) {
#pragma unroll
  for (int i = 0; i < vector; ++i) channels[i] = row.accumulate(i);
}

template <typename Acc, typename Row, int vector>
__device__ __forceinline__ void add_channels(const Row& row, Acc (&channels)[vector]) {
#pragma unroll
  for (int i = 0; i < vector; ++i) channels[i] += row.accumulate(i);
}

}  // namespace ssm_kernels::causal_conv1d
