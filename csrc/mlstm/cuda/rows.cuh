// The divisions of mlstm_scan on CUDA: out = row scale / (max(|d|, e^-m) + eps), forward of the numerators, backward of the
// gradient of out. A warp has a row, the values of one step and head.
#pragma once

#include <cuda_runtime.h>

#include "common/math.h"
#include "mlstm/cuda/divisor.cuh"
#include "mlstm/cuda/launch.h"
#include "mlstm/cuda/warps.cuh"

namespace ssm_kernels::mlstm {

constexpr int kRowWarps = 8;

template <typename Scalar, bool has_vectors>
__global__ void __launch_bounds__(kRowWarps* cuda::kWarpSize)
    mlstm_scale_rows_kernel(const __grid_constant__ RowParams p, int64_t first) {
  using Acc = cuda::AccumulateType<Scalar>;
  constexpr int kSize = has_vectors ? cuda::kVectorBytes / static_cast<int>(sizeof(Scalar)) : 1;
  using Values = cuda::Vector<Scalar, kSize>;
  const int64_t row = warp_number<kRowWarps>(first);
  if (row >= p.count) return;
  const int lane = threadIdx.x % cuda::kWarpSize;
  const Acc size = divisor_size(static_cast<const Acc*>(p.divisor)[row], Math<Acc>::exp(-static_cast<const Acc*>(p.m)[row]));
  const Acc factor = static_cast<Acc>(p.scale) / (size + static_cast<Acc>(p.eps));
  const Scalar* const source = static_cast<const Scalar*>(p.rows) + row * p.columns;
  Scalar* const target = static_cast<Scalar*>(p.out) + row * p.columns;
#pragma unroll 4
  for (int64_t c = lane * kSize; c < p.columns; c += cuda::kWarpSize * kSize) {
    const Values values = Values::load(source + c);
    Acc scaled[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) scaled[j] = values.accumulate(j) * factor;
    Values::round(scaled).store(target + c);
  }
}

template <typename Scalar>
cudaError_t launch_mlstm_scale_rows(const RowParams& params, bool has_vectors, cudaStream_t stream) {
  auto* const kernel = has_vectors ? mlstm_scale_rows_kernel<Scalar, true> : mlstm_scale_rows_kernel<Scalar, false>;
  return launch_warps<kRowWarps>(kernel, params.count, stream, params);
}

}  // namespace ssm_kernels::mlstm
