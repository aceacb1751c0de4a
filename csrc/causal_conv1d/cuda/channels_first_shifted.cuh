// Forward and backward of the causal convolution for channels-first tensors whose rows, the steps of a channel, start at any
// element and have any length. Warps, lanes and sums are those of channels_first.cuh, and so are the bits of the results.
//
// A kernel reads the aligned blocks of 16 bytes that hold an element of a row, and writes such blocks if they lie in the
// row as a whole. Elements of the first and the last block are written singly.
//
// Forward shifts the vectors of a warp in time so that those of `out` are aligned. Vectors of x are then aligned, too, if x and
// out have the same strides, as they mostly do; otherwise each is taken out of two blocks. In backward the steps of a lane
// decide in which order it adds its part of grad_weight, and they remain. It takes the vectors of x and of grad_out out of
// blocks in shared memory, one more than lanes, that the warp has copied. For grad_x each lane joins the end of its vector with
// the beginning of the vector of the lane above, which lane 31 got in the previous iteration, and writes the block that they
// form.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/channels_first.cuh"
#include "cuda/shifted_segment.cuh"

namespace ssm_kernels::causal_conv1d {

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps, 8)
    conv_fwd_channels_first_shifted_kernel(const ConvFwdParams p, const Tiling tiling) {
  using Acc = AccumulateType<Scalar>;
  using Tail = VectorTail<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar), kAhead = 4;
  using Inputs = cuda::Vector<Scalar, kVector>;
  ChannelsFirstSegment segment;
  if (!segment.find(p, tiling)) return;
  const int lane = segment.lane, warp_steps = kVector * segment.lanes;
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(segment.b, 0, segment.c);
  Scalar* const out = static_cast<Scalar*>(p.out.data) + p.out.offset(segment.b, 0, segment.c);
  // The tile's steps move back to where blocks of `out` begin. Blocks of x begin x_past elements before its vectors.
  const int past = cuda::bytes_past_multiple<kVectorBytes>(out) / static_cast<int>(sizeof(Scalar));
  const int x_past = cuda::bytes_past_multiple<kVectorBytes>(x - past) / static_cast<int>(sizeof(Scalar));
  const bool is_last = segment.end == p.seqlen;
  const int64_t first = segment.begin - past;
  // Steps are counted from `first` on, in 32 bits: the tile has `count`, the first `absent` of which precede the row.
  const int last = static_cast<int>((is_last ? p.seqlen : segment.end - past) - first);
  const int count = segment.exists ? last : 0, absent = first < 0 ? past : 0;
  // The same in all lanes of a warp. Rows that share a warp have one more vector than lanes at most.
  const int warp_count = segment.lanes < kWarpSize ? static_cast<int>(p.seqlen) + kVector - 1 : last;
  const int left_after = static_cast<int>(p.seqlen - first - last < kVector ? p.seqlen - first - last : kVector);
  const Scalar* const x_tile = x + first;
  Scalar* const out_tile = out + first;

  // The blocks of `ahead` vectors of x, each of one block or of two, from step `begin` on. The first ones are loaded before
  // anything else: no load waits for another. Rows that share a warp may begin differently.
  const bool is_aligned = __all_sync(cuda::kAllLanes, x_past == 0);
  Inputs blocks[kAhead];
  const auto load = [&](int begin, auto blocks_of_vector) {
    constexpr int kBlocks = decltype(blocks_of_vector)::value;
#pragma unroll
    for (int j = 0; j < kAhead / kBlocks; ++j) {
      const int step = begin + j * warp_steps + lane * kVector, next = kBlocks == 1 ? step + kVector : step - x_past + kVector;
      const Scalar* const source = x_tile + next;
      blocks[j * kBlocks] = step < count && next > absent ? Inputs::load(source - kVector) : Inputs::zero();
      if constexpr (kBlocks == 2) {
        blocks[j * kBlocks + 1] = step < count && next < count + left_after ? Inputs::load(source) : Inputs::zero();
      }
    }
  };
  using OneBlock = std::integral_constant<int, 1>;
  using TwoBlocks = std::integral_constant<int, 2>;
  is_aligned ? load(0, OneBlock()) : load(0, TwoBlocks());
  const int width = static_cast<int>(p.width);
  const Taps<Scalar, 1> taps(p, width, segment.c);
  // The elements before the tile's first step, by lag; zero beyond the lags of the convolution.
  Scalar before[Tail::kElements];
  {
    const Tail tail = Tail::load(p, segment, x);
    memcpy(before, tail.words, sizeof(before));
  }
  const auto preceding = [&](int lag) {
    Scalar value = from_accumulate<Scalar>(Acc(0));
#pragma unroll
    for (int i = 1; i <= kHalo; ++i) value = lag == i ? before[Tail::kElements - i] : value;
    return value;
  };
  Tail earlier;
  {
    Scalar elements[Tail::kElements];
#pragma unroll
    for (int i = 0; i < Tail::kElements; ++i) {
      const int lag = Tail::kElements - i;
      elements[i] = preceding(past + lag);
      if (segment.begin > 0 && lag < width) elements[i] = x_tile[-lag];
    }
    memcpy(earlier.words, elements, sizeof(earlier.words));
  }
  const auto convolve = [&](int begin, auto blocks_of_vector) {
    constexpr int kBlocks = decltype(blocks_of_vector)::value;
#pragma unroll
    for (int j = 0; j < kAhead / kBlocks; ++j) {
      const int step = begin + j * warp_steps + lane * kVector;
      // No lane has steps left.
      if (j > 0 && begin + j * warp_steps >= warp_count) break;
      Inputs loaded = blocks[j * kBlocks];
      if constexpr (kBlocks == 2) loaded = cuda::join_vectors(loaded, blocks[j * kBlocks + 1], x_past);
      if (j == 0 && step < absent) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (i < absent) loaded.set(i, preceding(absent - i));
        }
      }
      Acc inputs[kHalo + kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) inputs[kHalo + i] = loaded.accumulate(i);
      const Tail tail = Tail::of(loaded);
      tail.to_lane_above(segment, earlier, inputs);
      earlier = tail;
      if (step >= count) continue;
      Acc outputs[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) outputs[i] = taps.convolve(width, 0, [&](int lag) { return inputs[kHalo + i - lag]; });
      if (p.has_silu) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) outputs[i] = silu(outputs[i]);
      }
      const Inputs rounded = Inputs::round(outputs);
      if (absent <= step && step + kVector <= count) {
        rounded.store_once(out_tile + step);
      } else {
        cuda::store_range(out_tile + step, rounded, absent - step, count - step);
      }
    }
  };
  const auto run = [&](auto blocks_of_vector) {
    int begin = 0;
    while (true) {
      convolve(begin, blocks_of_vector);
      begin += kAhead / decltype(blocks_of_vector)::value * warp_steps;
      if (begin >= warp_count) break;
      load(begin, blocks_of_vector);
    }
  };
  is_aligned ? run(OneBlock()) : run(TwoBlocks());
  if (p.final_state.data != nullptr && is_last && lane == 0 && count > 0) {
    store_final_state_of_row<Scalar>(p, segment.b, segment.c);
  }
}

// A warp's part of a row, kWarpSize vectors, or its rows, as the aligned blocks in shared memory that hold them: one more block
// than vectors a row.
template <typename Scalar>
struct StagedVectors {
  static constexpr int kVector = kVectorBytes / sizeof(Scalar);
  using Inputs = cuda::Vector<Scalar, kVector>;

  static constexpr int kMostRows = kWarpSize >> kLeastLogShiftedLanes;

  alignas(kVectorBytes) char blocks[kWarps][(kWarpSize + kMostRows) * kVectorBytes];

  // Starts the copy of the lane's vector at `source`, of which `left` elements exist, or more in the same row. `past` is the
  // address's distance from a multiple of 16, the same for the whole row.
  __device__ __forceinline__ void start_copy(const ChannelsFirstSegment& segment, const Scalar* source, int past, int left) {
    char* const target = blocks[threadIdx.x / kWarpSize] + place(segment);
    const char* const first = reinterpret_cast<const char*>(source) - past;
    // Fewer than 32 bits, as only two blocks matter.
    const int left_bytes = (left < 2 * kVector ? left : 2 * kVector) * static_cast<int>(sizeof(Scalar)) + past;
    if (left_bytes > 0) cuda::cp_async<kVectorBytes>(target, first);
    if (segment.lane == segment.lanes - 1 && left_bytes > kVectorBytes) {
      cuda::cp_async<kVectorBytes>(target + kVectorBytes, first + kVectorBytes);
    }
  }
  // The lane's vector; elements that do not exist are zeros.
  __device__ __forceinline__ Inputs load(const ChannelsFirstSegment& segment, int past, int left) const {
    const char* const source = blocks[threadIdx.x / kWarpSize] + place(segment);
    Inputs vector = cuda::load_pieces<Scalar>(source, past);
    if (left < kVector) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i >= left) vector.set(i, from_accumulate<Scalar>(AccumulateType<Scalar>(0)));
      }
    }
    return vector;
  }

 private:
  __device__ __forceinline__ static int place(const ChannelsFirstSegment& segment) {
    return (static_cast<int>(threadIdx.x) % kWarpSize + segment.place) * kVectorBytes;
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarps, 6)
    conv_bwd_channels_first_shifted_kernel(const ConvBwdParams p, const Tiling tiling, AccumulateType<Scalar>* sums) {
  using Acc = AccumulateType<Scalar>;
  cuda::launch_dependents();
  using Tail = VectorTail<Scalar>;
  constexpr int kVector = kVectorBytes / sizeof(Scalar);
  using Inputs = cuda::Vector<Scalar, kVector>;
  // Pipeline stages of x and of grad_out: one in use, the others being copied.
  constexpr int kStages = 4;
  __shared__ StagedVectors<Scalar> stages[kStages][2];
  ChannelsFirstSegment segment;
  if (!segment.find(p, tiling)) return;
  const int lane = segment.lane, warp_steps = kVector * segment.lanes;
  const int width = static_cast<int>(p.width);
  const Taps<Scalar, 1> taps(p, width, segment.c);
  const Scalar* const x = static_cast<const Scalar*>(p.x.data) + p.x.offset(segment.b, 0, segment.c);
  const Scalar* const grad_out = static_cast<const Scalar*>(p.grad_out.data) + p.grad_out.offset(segment.b, 0, segment.c);
  Scalar* const grad_x = static_cast<Scalar*>(p.grad_x.data) + p.grad_x.offset(segment.b, 0, segment.c);
  // Steps are counted from the tile's first one, in 32 bits. The row has row_end, or at least kVector more than the tile.
  const int length = static_cast<int>(segment.end - segment.begin), count = segment.exists ? length : 0;
  const int row_end = length + static_cast<int>(p.seqlen - segment.end < kVector ? p.seqlen - segment.end : kVector);
  const Scalar *const x_tile = x + segment.begin, *const grad_out_tile = grad_out + segment.begin;
  Scalar* const grad_x_tile = grad_x + segment.begin;
  // Tiles and vectors begin at multiples of 16 bytes from the row's first element.
  const int x_past = cuda::bytes_past_multiple<kVectorBytes>(x),
            grad_out_past = cuda::bytes_past_multiple<kVectorBytes>(grad_out);
  const int grad_x_past = cuda::bytes_past_multiple<kVectorBytes>(grad_x) / static_cast<int>(sizeof(Scalar));

  const Scalar* const grad_final = grad_final_state_of<Scalar>(p, segment);

  Acc grad_weight[kMaxVectorWidth] = {}, grad_bias = 0;
  const int begin = lane * kVector;
  int t = begin + ((length - 1) & -warp_steps);
  const auto start_copies = [&](int t, int stage) {
    if (begin <= t) {
      stages[stage][0].start_copy(segment, x_tile + t, x_past, count - t);
      stages[stage][1].start_copy(segment, grad_out_tile + t, grad_out_past, count - t);
    }
    cuda::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) start_copies(t - i * warp_steps, i);
  // Lane 0: g at the kHalo steps after the warp's vectors, zero after the sequence.
  Acc later[kHalo];
  load_gradients_after(p, segment, taps, width, x, grad_out, later);
  const Tail first = Tail::load(p, segment, x);
  cuda::cp_async_wait<kStages - 2>();
  __syncwarp();
  Inputs next = stages[0][0].load(segment, x_past, count - t);
  Inputs above = Inputs::zero();  // lane 0: its vector of grad_x in the previous iteration
#pragma unroll 1
  for (int stage = 0; t >= begin; t -= warp_steps, stage = (stage + 1) % kStages) {
    // The lanes have read what this copy overwrites.
    __syncwarp();
    start_copies(t - (kStages - 1) * warp_steps, (stage + kStages - 1) % kStages);
    // Waits for this iteration and the next, in which lane 31 has the inputs before lane 0's.
    cuda::cp_async_wait<kStages - 2>();
    __syncwarp();
    const int left = count - t;  // steps of the tile from t on; negative in lanes without steps
    const Inputs loaded = next, grads = stages[stage][1].load(segment, grad_out_past, left);
    Tail earlier = first;
    if (t > begin) {
      next = stages[(stage + 1) % kStages][0].load(segment, x_past, kVector);
      earlier = Tail::of(next);
    }
    Acc inputs[kHalo + kVector], g[kVector + kHalo];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      inputs[kHalo + i] = loaded.accumulate(i);
      g[i] = grads.accumulate(i);
    }
    Tail::of(loaded).to_lane_above(segment, earlier, inputs);
    if (p.has_silu) {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        g[i] *= silu_derivative(taps.convolve(width, 0, [&](int lag) { return inputs[kHalo + i - lag]; }));
    }
    if (left < kVector) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i >= left) g[i] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kHalo; ++i) {
      const Acc sent = lane == 0 ? later[i] : g[i];
      g[kVector + i] = __shfl_sync(cuda::kAllLanes, sent, segment.lane + 1, segment.lanes);
      later[i] = g[i];
    }

    Acc grad_inputs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      grad_inputs[i] = taps.correlate(width, 0, [&](int lag) { return g[i + lag]; });
    }
    // Skips steps after the last one, as zero times an infinity or NaN is NaN.
    const auto add_products = [&](auto is_whole) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!is_whole && i >= left) break;
#pragma unroll
        for (int lag = 0; lag < kMaxVectorWidth; ++lag) {
          grad_weight[lag] = Math<Acc>::fma(g[i], inputs[kHalo + i - lag], grad_weight[lag]);
        }
        grad_bias += g[i];
      }
    };
    left >= kVector ? add_products(std::true_type()) : add_products(std::false_type());
    if (grad_final != nullptr && t + kVector + kHalo > row_end) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int index = t + i - (row_end - (width - 1));
        if (index >= 0 && index < width - 1) {
          grad_inputs[i] += to_accumulate(grad_final[index * p.grad_final_state.stride_step]);
        }
      }
    }
    if (p.grad_x.data == nullptr) continue;
    const Inputs rounded = Inputs::round(grad_inputs);
    // Rows that share a warp may begin differently, and each ends in this iteration.
    if (segment.lanes < kWarpSize) {
      cuda::store_range(grad_x_tile + t, rounded, 0, left);
      continue;
    }
    if (grad_x_past == 0) {
      if (left >= kVector) {
        rounded.store_once(grad_x_tile + t);
      } else {
        cuda::store_range(grad_x_tile + t, rounded, 0, left);
      }
      continue;
    }
    // The block that the row's vector t ends in.
    const int block_begin = kVector - grad_x_past;
    const Inputs block = cuda::join_lane_above(rounded, above, block_begin * static_cast<int>(sizeof(Scalar)));
    if (left >= block_begin + kVector) {
      block.store_once(grad_x_tile + t + block_begin);
    } else {
      cuda::store_range(grad_x_tile + t + block_begin, block, 0, left - block_begin);
    }
    if (t == 0) cuda::store_range(grad_x_tile + t, rounded, 0, left < block_begin ? left : block_begin);
    above = rounded;
  }

  if (sums != nullptr) store_tile_sums(p, tiling, segment, width, grad_weight, grad_bias, sums);
}

}  // namespace ssm_kernels::causal_conv1d
