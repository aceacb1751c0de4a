// The gradients of weight and bias from their sums over tiles of time, (tiles, width + 1, channels), added up in the order of
// the tiles: a block has kWarpSize neighboring columns of (width + 1, channels), each of its warps every kFinishWarps-th tile.
#pragma once

#include "causal_conv1d/cuda/device.cuh"

namespace ssm_kernels::causal_conv1d {

constexpr int kFinishWarps = 8;

template <typename Scalar>
__device__ __forceinline__ void store_parameter(void* target, int64_t offset, bool is_input_kind,
                                                AccumulateType<Scalar> value) {
  if (is_input_kind) {
    static_cast<Scalar*>(target)[offset] = from_accumulate<Scalar>(value);
  } else {
    static_cast<AccumulateType<Scalar>*>(target)[offset] = value;
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kFinishWarps)
    conv_bwd_finish_kernel(const ConvBwdParams p, const AccumulateType<Scalar>* sums, int64_t tiles) {
  using Acc = AccumulateType<Scalar>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t columns = (p.width + 1) * p.channels, column = static_cast<int64_t>(blockIdx.x) * kWarpSize + lane;
  Acc sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t tile = warp; tile < tiles; tile += kFinishWarps) sum += sums[tile * columns + column];
  }
  __shared__ Acc shared[kFinishWarps][kWarpSize];
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
#pragma unroll
  for (int w = 1; w < kFinishWarps; ++w) sum += shared[w][lane];
  const int64_t row = column / p.channels, c = column - row * p.channels;
  if (row == p.width) {
    if (p.grad_bias != nullptr) store_parameter<Scalar>(p.grad_bias, c, p.bias.is_input_kind, sum);
  } else if (p.grad_weight != nullptr) {
    store_parameter<Scalar>(p.grad_weight, c * p.width + p.width - 1 - row, p.weight.is_input_kind, sum);
  }
}

}  // namespace ssm_kernels::causal_conv1d
