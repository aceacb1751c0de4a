// The gradients of weight and bias: adds their partial sums over tiles of time, (tiles, width + 1, channels), in the order of
// the tiles. The kernel that writes the sums lets this one start early, so that its launch takes no time of its own.
#pragma once

#include "causal_conv1d/cuda/taps.cuh"
#include "cuda/partial_sums.cuh"
#include "cuda/ptx/pdl.cuh"

namespace ssm_kernels::causal_conv1d {

// There are many columns, (width + 1) * channels, and few tiles.
using TileSums = cuda::PartialSums</*columns=*/32, /*rows=*/8, /*loads=*/8>;

template <typename Scalar>
__global__ void __launch_bounds__(TileSums::kThreads)
    conv_bwd_reduce_kernel(const ConvBwdParams p, const AccumulateType<Scalar>* sums, int64_t tiles) {
  using Acc = AccumulateType<Scalar>;
  cuda::grid_dependency_sync();
  const auto store = [](void* target, int64_t offset, bool is_input_kind, Acc value) {
    if (is_input_kind) {
      static_cast<Scalar*>(target)[offset] = from_accumulate<Scalar>(value);
    } else {
      static_cast<Acc*>(target)[offset] = value;
    }
  };
  TileSums::add(sums, tiles, (p.width + 1) * p.channels, blockIdx.x, [&](int64_t column, Acc sum) {
    const int64_t lag = column / p.channels, c = column - lag * p.channels;
    if (lag == p.width) {
      if (p.grad_bias != nullptr) store(p.grad_bias, c, p.bias.is_input_kind, sum);
    } else if (p.grad_weight != nullptr) {
      store(p.grad_weight, c * p.width + p.width - 1 - lag, p.weight.is_input_kind, sum);
    }
  });
}

}  // namespace ssm_kernels::causal_conv1d
