// Computes A = -exp(A_log), and converts it, the bias of the step sizes and D to the accumulation type. Writes the three one
// after another.
//
// A thread computes one element; the grid covers the three tensors in that order. The kernel branches on each
// tensor's dtype at run time: with at most about 10^5 elements a call takes little longer than an empty launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/activations.h"
#include "common/limits.h"
#include "cuda/vector_io.cuh"
#include "mixers/cuda/launch.h"

namespace ssm_kernels::mixers {

constexpr int kParameterThreads = 256;

template <typename Acc>
__device__ __forceinline__ Acc load_parameter(const ParameterView& view, int64_t index) {
  switch (view.kind) {
    case ScalarKind::kFloat:
      return static_cast<Acc>(static_cast<const float*>(view.data)[index]);
    case ScalarKind::kDouble:
      return static_cast<Acc>(static_cast<const double*>(view.data)[index]);
    case ScalarKind::kHalf:
      return static_cast<Acc>(cuda::to_accumulate(static_cast<const __half*>(view.data)[index]));
    case ScalarKind::kBFloat16:
      return static_cast<Acc>(cuda::to_accumulate(static_cast<const __nv_bfloat16*>(view.data)[index]));
  }
  return 0;
}

template <typename Acc>
__global__ void __launch_bounds__(kParameterThreads) mixer_parameters_kernel(const MixerParametersParams p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kParameterThreads + threadIdx.x;
  Acc* const out = static_cast<Acc*>(p.out);
  if (index < p.A_log.count) {
    // Uses the accurate exponential, not the approximation of Math<float>: the effect of an error in A grows with time.
    out[index] = -clamp(::exp(load_parameter<Acc>(p.A_log, index)), Acc(0), kLargestRate<Acc>);
    return;
  }
  const int64_t bias_index = index - p.A_log.count, D_index = bias_index - p.bias.count;
  if (D_index < 0) {
    out[index] = load_parameter<Acc>(p.bias, bias_index);
  } else if (D_index < p.D.count) {
    out[index] = load_parameter<Acc>(p.D, D_index);
  }
}

template <typename Acc>
cudaError_t launch_mixer_parameters(const MixerParametersParams& params, cudaStream_t stream) {
  const int64_t count = params.A_log.count + params.bias.count + params.D.count;
  const int64_t blocks = (count + kParameterThreads - 1) / kParameterThreads;
  mixer_parameters_kernel<Acc><<<static_cast<unsigned int>(blocks), kParameterThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::mixers
