// The decay of a span of steps whose transitions are exponentials, e^(A sum of delta), with the sum of each channel in double:
// what selective_scan's summary and ssd's share on CUDA. The product of all transitions would have an error that grows with
// their number.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "common/integers.h"
#include "common/kernel_abi.h"
#include "common/macros.h"

namespace ssm_kernels::cuda {

// Steps of a partial sum. It depends on no size, so that a row's bits do not depend on its batch.
constexpr int64_t kSumSteps = 256;

struct SpanDecay {
  int64_t batch = 0, channels = 0, seqlen = 0, states = 1;
  // The step sizes, (batch, channels, seqlen), before the bias, softplus and the limits. Strides are in elements.
  const void* delta = nullptr;
  int64_t stride_batch = 0, stride_channel = 0, stride_step = 0;
  const void* bias = nullptr;  // (channels,), or null
  int64_t bias_stride = 0;
  bool apply_softplus = false;
  double dt_min = -std::numeric_limits<double>::infinity(), dt_max = std::numeric_limits<double>::infinity();
  const void* A = nullptr;  // (channels, states)
  int64_t A_stride_channel = 0, A_stride_state = 0;
  double* sums = nullptr;  // a workspace, (batch, channels, parts())
  void* decay = nullptr;   // (batch, channels, states), contiguous

  SSM_HOST_DEVICE int64_t parts() const { return ceil_div(seqlen, kSumSteps); }
};

// Queues the kernels. Scalar is the type of delta; bias, A and decay have its accumulation type.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_span_decay(const SpanDecay& span, cudaStream_t stream);

SSM_KERNEL_STRUCT(SpanDecay, 144);

}  // namespace ssm_kernels::cuda
