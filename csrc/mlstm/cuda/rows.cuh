// The divisions of mlstm_scan on CUDA: a warp has a row, the values of one step and head.
//
// mlstm_scale_rows_kernel: out = row scale / (max(|d|, e^-m) + eps), forward of the numerators, backward of the gradient of
// out. mlstm_grad_products_kernel: the gradient of n q, -scale sign(d) [|d| > e^-m] q . grad_q / (max(|d|, e^-m) + eps). grad_q
// is the gradient of q through the numerators, rounded to Scalar; q . grad_q equals the sum of grad_out times out.
#pragma once

#include <cuda_runtime.h>

#include "common/math.h"
#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "mlstm/cuda/launch.h"

namespace ssm_kernels::mlstm {

constexpr int kRowWarps = 8, kRowThreads = kRowWarps * cuda::kWarpSize;
constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;

// The row of this warp in the launch's blocks.
__device__ __forceinline__ int64_t warp_row(int64_t first) {
  return first + static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / cuda::kWarpSize;
}

template <typename Scalar, bool has_vectors>
__global__ void __launch_bounds__(kRowThreads) mlstm_scale_rows_kernel(const __grid_constant__ RowParams p, int64_t first) {
  using Acc = cuda::AccumulateType<Scalar>;
  constexpr int kSize = has_vectors ? cuda::kVectorBytes / static_cast<int>(sizeof(Scalar)) : 1;
  using Values = cuda::Vector<Scalar, kSize>;
  const int64_t row = warp_row(first);
  if (row >= p.count) return;
  const int lane = threadIdx.x % cuda::kWarpSize;
  Acc divisor;
  if (p.products != nullptr) {
    divisor = static_cast<Acc>(p.scale) * cuda::to_accumulate(static_cast<const Scalar*>(p.products)[row]);
    if (lane == 0) static_cast<Acc*>(p.divisor)[row] = divisor;
  } else {
    divisor = static_cast<const Acc*>(p.divisor)[row];
  }
  const Acc floor = Math<Acc>::exp(-static_cast<const Acc*>(p.m)[row]), size = Math<Acc>::abs(divisor);
  const Acc factor = static_cast<Acc>(p.scale) / ((size > floor || size != size ? size : floor) + static_cast<Acc>(p.eps));
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
__global__ void __launch_bounds__(kRowThreads)
    mlstm_grad_products_kernel(const __grid_constant__ ProductGradParams p, int64_t first) {
  using Acc = cuda::AccumulateType<Scalar>;
  const int64_t row = warp_row(first);
  if (row >= p.batch * p.seqlen * p.heads) return;
  const int64_t step_of_all = row / p.heads, head = row - step_of_all * p.heads;
  const int64_t batch = step_of_all / p.seqlen, step = step_of_all - batch * p.seqlen;
  const auto row_of = [&](const KeyView& view) {
    return static_cast<const Scalar*>(view.data) + batch * view.stride_batch + step * view.stride_step +
           head * view.stride_head;
  };
  const int lane = threadIdx.x % cuda::kWarpSize;
  const Scalar *const q = row_of(p.q), *const grad_q = row_of(p.grad_q);
  Acc sum = 0;
#pragma unroll 8
  for (int c = lane; c < p.key_dim; c += cuda::kWarpSize) {
    sum = Math<Acc>::fma(cuda::to_accumulate(q[c]), cuda::to_accumulate(grad_q[c]), sum);
  }
#pragma unroll
  for (int distance = 1; distance < cuda::kWarpSize; distance *= 2) {
    sum += __shfl_xor_sync(cuda::kAllLanes, sum, distance);
  }
  if (lane != 0) return;
  const Acc divisor = static_cast<const Acc*>(p.divisor)[row], size = Math<Acc>::abs(divisor);
  const Acc floor = Math<Acc>::exp(-static_cast<const Acc*>(p.m)[row]);
  const Acc scale = static_cast<Acc>(divisor < 0 ? p.scale : -p.scale);
  const Acc grad = size > floor || size != size ? scale * sum / (size + static_cast<Acc>(p.eps)) : Acc(0);
  static_cast<Scalar*>(p.grad_products)[row] = cuda::from_accumulate<Scalar>(grad);
}

// Launches a kernel for all rows: a grid has a limited size.
template <typename Kernel, typename Params>
cudaError_t launch_rows(Kernel* kernel, const Params& params, int64_t count, cudaStream_t stream) {
  for (int64_t first = 0; first < count; first += kMostBlocks * kRowWarps) {
    const int64_t left = (count - first + kRowWarps - 1) / kRowWarps, blocks = left < kMostBlocks ? left : kMostBlocks;
    const cudaError_t error = cuda::launch(kernel, blocks, kRowThreads, 0, stream, false, params, first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Scalar>
cudaError_t launch_mlstm_scale_rows(const RowParams& params, bool has_vectors, cudaStream_t stream) {
  auto* const kernel = has_vectors ? mlstm_scale_rows_kernel<Scalar, true> : mlstm_scale_rows_kernel<Scalar, false>;
  return launch_rows(kernel, params, params.count, stream);
}

template <typename Scalar>
cudaError_t launch_mlstm_grad_products(const ProductGradParams& params, cudaStream_t stream) {
  return launch_rows(mlstm_grad_products_kernel<Scalar>, params, params.batch * params.seqlen * params.heads, stream);
}

}  // namespace ssm_kernels::mlstm
