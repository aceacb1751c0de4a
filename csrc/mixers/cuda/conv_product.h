// Interface between the CUDA entry point (conv_product.cpp) and the kernel that computes backward of a Mamba mixer's
// convolution together with a part of its gradient, the product of the gradient of (dt, B, C) with x_proj.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "causal_conv1d/cuda/launch.h"
#include "common/kernel_abi.h"
#include "cuda/constants.h"

namespace ssm_kernels::mixers {

// Steps of a product, and those that a copy of x and of the scan's gradient has.
constexpr int kProductSteps = 8, kCopiedSteps = 4;
constexpr int kTermGroup = 16;  // terms of a product of the tensor cores
// Registers allow this number of warps a multiprocessor.
constexpr int kProductWarps = 16, kMostBlockWarps = 8;

// grad_out is the sum of conv.grad_out and rows weight. rows: (batch, seqlen, terms), contiguous; weight: (terms, channels),
// with rows weight_stride elements apart. terms is a multiple of kTermGroup; rows and weight start at multiples of 16 bytes.
struct ConvProductParams {
  causal_conv1d::ConvBwdParams conv;
  const void *rows = nullptr, *weight = nullptr;
  int64_t weight_stride = 0;
  int terms = 0;
};

// The parts of a block's shared memory, in bytes: the weight's columns, two stages of copies, products and rows of each warp.
struct ConvProductMemory {
  static constexpr int kBytes = 2, kPad = 16, kChannels = cuda::kWarpSize * causal_conv1d::kLaneChannels;
  static constexpr int kPitch = kChannels * kBytes + kPad;  // rows start in different banks

  int row_pitch, stages, products, rows, total;

  constexpr ConvProductMemory(int terms, int warps)
      : row_pitch(terms * kBytes + kPad),
        stages(terms * kPitch),
        products(stages + 2 * 2 * kCopiedSteps * warps * kChannels * kBytes),
        rows(products + warps * kProductSteps * kPitch),
        total(rows + warps * kProductSteps * row_pitch) {}
};

// tiling: steps is a multiple of kProductSteps; a tile is `warps` * steps steps. sums: (batch, tiles, width + 1, channels),
// null if no parameter needs a gradient.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_conv_product(const ConvProductParams& params, const causal_conv1d::Tiling& tiling, int warps,
                                               float* sums, cudaStream_t stream);

SSM_KERNEL_STRUCT(ConvProductParams, 408);

}  // namespace ssm_kernels::mixers
