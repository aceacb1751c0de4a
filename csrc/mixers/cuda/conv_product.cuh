// Backward of a Mamba mixer's convolution, with one of the products before it. x = silu(conv(x_raw)) has two gradients, that of
// the scan and one through x_proj:
//
//   grad_out = grad_u + rows weight            rows: the gradient of (dt, B, C), a row a step; weight: x_proj
//
// The product has few terms. As a kernel of its own it is bound by memory: it reads and writes the sum, which the convolution
// reads again. Here it stays in shared memory.
//
// Blocks, warps and lanes have the channels and steps of channels_last_bwd.cuh: a warp owns kChannels channels of a segment of
// steps and goes back in time, a lane kLaneChannels of the channels. For every kProductSteps steps the warp multiplies
// weight^T (channels x terms) with rows^T (terms x steps) by tensor cores, rounds the result as a product of its own would
// round it, and stores its transpose to shared memory. Lanes then read a step's product of their own channels.
//
// cp.async copies all inputs. It writes zeros in place of steps before and after the sequence: g is zero after the last step,
// and so the loops have no other cases. The kernel takes rows of one sequence without states, and a width of kMaxVectorWidth.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/taps.cuh"
#include "cuda/index_math.cuh"
#include "cuda/launch.cuh"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma_sm80.cuh"
#include "mixers/cuda/conv_product.h"

namespace ssm_kernels::mixers {

using causal_conv1d::kHalo;
using causal_conv1d::kLaneChannels;
using causal_conv1d::kMaxVectorWidth;
using cuda::kWarpSize;

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kMostBlockWarps, kProductWarps / kMostBlockWarps)
    conv_product_bwd_kernel(const ConvProductParams params, const causal_conv1d::Tiling tiling, float* sums) {
  using Memory = ConvProductMemory;
  using Row = cuda::Vector<Scalar, kLaneChannels>;
  constexpr int kVector = kLaneChannels, kSteps = kProductSteps, kLags = kMaxVectorWidth, kSums = kLags + 1;
  constexpr int kPitch = Memory::kPitch, kBlock = 16;  // bytes of a copy
  constexpr int kStageBytes = 2 * kCopiedSteps * 2 * kWarpSize * Row::kBytes;
  static_assert(kSteps == 2 * kCopiedSteps, "a product's steps are two stages of copies");
  static_assert(sizeof(Scalar) == Memory::kBytes, "the operands of the products are fp16 or bf16");
  const causal_conv1d::ConvBwdParams& p = params.conv;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int threads = blockDim.x, warps = threads / kWarpSize, terms = params.terms;

  extern __shared__ __align__(16) char memory[];
  const Memory parts(terms, warps);
  char* const weight = memory;
  char* const stages = memory + parts.stages + threadIdx.x / kWarpSize * kStageBytes + lane * Row::kBytes;
  char* const products = memory + parts.products + warp * kSteps * kPitch;
  char* const rows = memory + parts.rows + warp * kSteps * parts.row_pitch;

  const unsigned channel_blocks = static_cast<unsigned>(tiling.channel_blocks), tiles = static_cast<unsigned>(tiling.tiles);
  const unsigned tile = blockIdx.x / channel_blocks;
  const int64_t first_channel = int64_t(blockIdx.x - tile * channel_blocks) * Memory::kChannels;
  const int64_t b = tile / tiles;
  const int seqlen = static_cast<int>(p.seqlen), steps = static_cast<int>(tiling.steps);
  const int first = (static_cast<int>(tile - tile / tiles * tiles) * warps + warp) * steps;
  const int limit = (seqlen + kSteps - 1) / kSteps * kSteps, end = first + steps < limit ? first + steps : limit;
  // Lanes behind the last channel compute the first one again, and store nothing.
  const bool has_channels = first_channel + lane * kVector < p.channels;
  const int64_t c = has_channels ? first_channel + lane * kVector : 0;

  // The row of step t, or of step 0 in its place if the sequence has no step t.
  const auto base_of = [&](const causal_conv1d::SequenceView& view) {
    return static_cast<char*>(view.data) + view.offset(b, 0, c) * Memory::kBytes;
  };
  const char* const x_base = base_of(p.x);
  const char* const grad_base = base_of(p.grad_out);
  char* const grad_x_base = base_of(p.grad_x);
  const auto bytes_of = [](int64_t stride) { return static_cast<int>(stride) * Memory::kBytes; };
  const int x_stride = bytes_of(p.x.stride_step), grad_stride = bytes_of(p.grad_out.stride_step);
  const int grad_x_stride = bytes_of(p.grad_x.stride_step);
  const auto has_step = [&](int t) { return t >= 0 && t < seqlen; };

  const auto load = [&](const char* base, int stride, int t) {
    return has_step(t) ? Row::load_once(reinterpret_cast<const Scalar*>(cuda::add_product(base, t, stride))) : Row::zero();
  };
  const auto stage_of = [&](int stage, int j, int which) {
    return stages + ((stage * kCopiedSteps + j) * 2 + which) * kWarpSize * Row::kBytes;
  };
  // The inputs of steps t to t - kCopiedSteps + 1: grad_u, and x kHalo steps before. is_inner: the sequence has all of them.
  const auto start_copies = [&](int t, int stage, auto is_inner) {
#pragma unroll
    for (int j = 0; j < kCopiedSteps; ++j) {
      const auto copy = [&](const char* base, int stride, int t, int which) {
        if constexpr (decltype(is_inner)::value) {
          cuda::cp_async<Row::kBytes>(stage_of(stage, j, which), cuda::add_product(base, t, stride));
        } else {
          const bool exists = has_step(t);
          cuda::cp_async<Row::kBytes>(stage_of(stage, j, which), cuda::add_product(base, exists ? t : 0, stride),
                                      exists ? Row::kBytes : 0);
        }
      };
      copy(x_base, x_stride, t - kHalo - j, 0);
      copy(grad_base, grad_stride, t - j, 1);
    }
  };
  // The rows of the product of steps t to t + kSteps - 1: some lanes for each.
  constexpr int kLanesOfRow = kWarpSize / kSteps;
  const int row_bytes = terms * Memory::kBytes, rows_first = lane % kLanesOfRow * kBlock;
  const char* const rows_base = static_cast<const char*>(params.rows) + b * seqlen * row_bytes + rows_first;
  char* const rows_target = rows + lane / kLanesOfRow * parts.row_pitch + rows_first;
  const auto start_rows = [&](int t) {
    const bool exists = t + lane / kLanesOfRow < seqlen;
    const char* const source = cuda::add_product(rows_base, exists ? t + lane / kLanesOfRow : 0, row_bytes);
#pragma unroll 1
    for (int at = 0; at < row_bytes - rows_first; at += kLanesOfRow * kBlock) {
      cuda::cp_async(rows_target + at, source + at, exists ? kBlock : 0);
    }
  };
  // A row of the weight in shared memory has the channels of a term; ldmatrix transposes.
  const uint32_t weight_lane = cuda::shared_address(weight) + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * kBlock;
  const uint32_t rows_lane = cuda::shared_address(rows) + lane / 4 * parts.row_pitch + lane % 4 * sizeof(uint32_t);
  char* const products_lane = products + lane % 8 * kPitch + lane / 8 * kBlock;
  const auto multiply = [&] {
    // Fragments of 16 channels. In fp16, whose conversions take more registers, all at once would spill.
    constexpr int kFragments = Memory::kChannels / 16, kAtOnce = std::is_same_v<Scalar, __half> ? kFragments / 2 : kFragments;
    constexpr int kGroupBytes = kTermGroup * Memory::kBytes;
#pragma unroll 1
    for (int from = 0; from < kFragments; from += kAtOnce) {
      float d[kAtOnce][4] = {};
#pragma unroll 1
      for (int k = 0; k < terms / kTermGroup; ++k) {
        const uint32_t b0 = load_word(rows_lane + k * kGroupBytes), b1 = load_word(rows_lane + k * kGroupBytes + kBlock);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          uint32_t a[4];
          cuda::ldmatrix_transposed(a, weight_lane + k * kTermGroup * kPitch + (from + i) * kGroupBytes);
          cuda::mma<Scalar>(d[i], a, b0, b1);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i += 2) {
        const uint32_t packed[4] = {cuda::pack<Scalar>(d[i][0], d[i][1]), cuda::pack<Scalar>(d[i][2], d[i][3]),
                                    cuda::pack<Scalar>(d[i + 1][0], d[i + 1][1]), cuda::pack<Scalar>(d[i + 1][2], d[i + 1][3])};
        cuda::stmatrix_transposed(products_lane + (from + i) * kGroupBytes, packed);
      }
    }
  };

  {
    constexpr int kBlocksOfRow = Memory::kChannels * Memory::kBytes / kBlock;
    for (int i = threadIdx.x; i < terms * kBlocksOfRow; i += threads) {
      const int term = i / kBlocksOfRow, at = i % kBlocksOfRow * kBlock;
      const bool exists = first_channel + at / Memory::kBytes < p.channels;
      const char* const source = static_cast<const char*>(params.weight) +
                                 (term * params.weight_stride + (exists ? first_channel : 0)) * Memory::kBytes;
      cuda::cp_async(weight + term * kPitch + at, source + (exists ? at : 0), exists ? kBlock : 0);
    }
  }
  const bool has_after = first < end && end < seqlen;
  if (has_after) start_rows(end);
  const causal_conv1d::Taps<Scalar, kVector> taps(p, kMaxVectorWidth, c);
  float grad_weight[kSums][kVector] = {};
  cuda::cp_async_wait();
  __syncthreads();

  if (first < end) {
    float inputs[kVector], before[kHalo][kVector], grad_after[kHalo][kVector] = {};
    const auto accumulate = [](const Row& row, float (&target)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) target[i] = row.accumulate(i);
    };
    // grad_u of step t plus its product, times the activation's derivative.
    const auto make_g = [&](const Row& grad, int t, float (&g)[kVector]) {
      Row product;
      memcpy(&product, products + t % kSteps * kPitch + lane * Row::kBytes, sizeof(product));
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float pre = taps.convolve(kMaxVectorWidth, i, [&](int lag) { return lag == 0 ? inputs[i] : before[lag - 1][i]; });
        g[i] = (grad.accumulate(i) + product.accumulate(i)) * causal_conv1d::silu_derivative(pre);
      }
    };
    // Moves the windows one step back; inputs have no place for the oldest yet.
    const auto shift = [&](const float (&g)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        inputs[i] = before[0][i];
#pragma unroll
        for (int lag = 1; lag < kHalo; ++lag) before[lag - 1][i] = before[lag][i];
#pragma unroll
        for (int lag = kHalo - 1; lag > 0; --lag) grad_after[lag][i] = grad_after[lag - 1][i];
        grad_after[0][i] = g[i];
      }
    };
    int newest = end - 1;
    if (has_after) {
      multiply();
      __syncwarp();
      newest = end + kHalo - 1;
    }
    accumulate(load(x_base, x_stride, newest), inputs);
#pragma unroll
    for (int lag = 1; lag < kHalo; ++lag) accumulate(load(x_base, x_stride, newest - lag), before[lag - 1]);
    if (has_after) {
#pragma unroll
      for (int t = kHalo - 1; t >= 0; --t) {
        accumulate(load(x_base, x_stride, end + t - kHalo), before[kHalo - 1]);
        float g[kVector];
        make_g(load(grad_base, grad_stride, end + t), t, g);
        shift(g);
      }
      __syncwarp();
    }

    const auto run = [&](int t, int stage, auto is_inner) {
#pragma unroll
      for (int j = 0; j < kCopiedSteps; ++j) {
        Row x, grad;
        memcpy(&x, stage_of(stage, j, 0), sizeof(x));
        memcpy(&grad, stage_of(stage, j, 1), sizeof(grad));
        accumulate(x, before[kHalo - 1]);
        float g[kVector], grad_x[kVector];
        make_g(grad, t - j, g);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          grad_x[i] = taps.correlate(kMaxVectorWidth, i, [&](int lag) { return lag == 0 ? g[i] : grad_after[lag - 1][i]; });
          grad_weight[0][i] = fmaf(g[i], inputs[i], grad_weight[0][i]);
#pragma unroll
          for (int lag = 1; lag < kLags; ++lag) grad_weight[lag][i] = fmaf(g[i], before[lag - 1][i], grad_weight[lag][i]);
          grad_weight[kLags][i] += g[i];
        }
        if (has_channels && (decltype(is_inner)::value || has_step(t - j))) {
          Row::round(grad_x).store_once(reinterpret_cast<Scalar*>(cuda::add_product(grad_x_base, t - j, grad_x_stride)));
        }
        shift(g);
      }
    };
    const auto compute = [&](int t, auto is_inner) {
      start_copies(t + kCopiedSteps - 1, 1, is_inner);
      cuda::cp_async_commit();
      cuda::cp_async_wait<1>();
      __syncwarp();
      multiply();
      __syncwarp();
      if (t > first) start_rows(t - kSteps);
      run(t + kSteps - 1, 0, is_inner);
      if (t > first) start_copies(t - 1, 0, is_inner);
      cuda::cp_async_commit();
      cuda::cp_async_wait<1>();
      run(t + kCopiedSteps - 1, 1, is_inner);
    };
    start_rows(end - kSteps);
    start_copies(end - 1, 0, std::false_type());
    cuda::cp_async_commit();
#pragma unroll 1
    for (int t = end - kSteps; t >= first; t -= kSteps) {
      // The copies of x begin kHalo steps before the next tile.
      if (t >= kSteps && t + kSteps <= seqlen) {
        compute(t, std::true_type());
      } else {
        compute(t, std::false_type());
      }
    }
  }

  if (sums == nullptr) return;
  __syncthreads();
  float* const shared = reinterpret_cast<float*>(memory);
  const auto place = [](int warp, int row, int i, int lane) { return ((warp * kSums + row) * kVector + i) * kWarpSize + lane; };
#pragma unroll
  for (int row = 0; row < kSums; ++row) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) shared[place(warp, row, i, lane)] = grad_weight[row][i];
  }
  __syncthreads();
  float* const target = sums + int64_t(tile) * kSums * p.channels + first_channel;
  for (int index = threadIdx.x; index < kSums * Memory::kChannels; index += threads) {
    const int row = index / Memory::kChannels, channel = index % Memory::kChannels;
    if (first_channel + channel >= p.channels) continue;
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += shared[place(w, row, channel % kVector, channel / kVector)];
    target[row * p.channels + channel] = sum;
  }
}

template <typename Scalar>
cudaError_t launch_conv_product(const ConvProductParams& params, const causal_conv1d::Tiling& tiling, int warps, float* sums,
                                cudaStream_t stream) {
  const causal_conv1d::ConvBwdParams& p = params.conv;
  const int64_t tiles = p.batch * tiling.tiles;
  const ConvProductMemory memory(params.terms, warps);
  const auto kernel = &conv_product_bwd_kernel<Scalar>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, memory.total); error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(tiles * tiling.channel_blocks);
  kernel<<<blocks, kWarpSize * warps, memory.total, stream>>>(params, tiling, sums);
  if (sums == nullptr) return cudaGetLastError();
  return causal_conv1d::launch_bwd_reduce<Scalar>(p, sums, tiles, stream);
}

}  // namespace ssm_kernels::mixers
