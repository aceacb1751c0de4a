// The real Schur form of each matrix A, in float64: a warp takes a matrix in shared memory, and its lanes take the rows and
// columns of each reflection (common/schur.h). All lanes compute the scalars.
#pragma once

#include "common/schur.h"
#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "selective_scan/cuda/dense_launch.h"

namespace ssm_kernels::selective_scan::dense {

struct Warp {
  int lane = static_cast<int>(threadIdx.x) % cuda::kWarpSize, count = cuda::kWarpSize;
  __device__ __forceinline__ void sync() const { __syncwarp(); }
};

// kLargest is at least dstate. A multiprocessor has room for 16 blocks of 16 rows.
template <typename Acc, int kLargest>
__global__ __launch_bounds__(cuda::kWarpSize,
                             kLargest == 16 ? 16 : 8) void dense_reduce_kernel(const __grid_constant__ ReduceParams p) {
  constexpr int kStride = kLargest + 1;  // odd, so that the lanes of a column read different banks
  __shared__ double T[kLargest * kStride], Q[kLargest * kStride];
  const int n = static_cast<int>(p.dstate), padded = static_cast<int>(padded_states(p.dstate)), lane = threadIdx.x;
  const SchurForm form{T, Q, n, kStride};
  const Acc* const A = static_cast<const Acc*>(p.A) + blockIdx.x * p.stride_matrix;
  for (int i = lane; i < n * n; i += cuda::kWarpSize) {
    form.t(i / n, i % n) = static_cast<double>(A[i / n * p.stride_row + i % n * p.stride_column]);
  }
  __syncwarp();
  reduce_to_schur<kLargest>(form, Warp());
  if (kLargest == 16) align_pairs(form, Warp());  // for dense_channel.cuh
  const int size = padded * padded;
  Acc* const result = static_cast<Acc*>(p.result) + blockIdx.x * static_cast<int64_t>(size);
  for (int i = lane; i < size; i += cuda::kWarpSize) {
    const int row = i / padded, column = i % padded;
    const bool is_inside = row < n && column < n;
    const auto store = [&](int which, double value) {
      result[which * p.matrices * size + i] = is_inside ? static_cast<Acc>(value) : Acc(0);
    };
    store(0, is_inside ? form.t(row, column) : 0);
    store(1, is_inside ? form.q(row, column) : 0);
    store(2, is_inside ? form.t(column, row) : 0);
    store(3, is_inside ? form.q(column, row) : 0);
  }
}

inline cudaError_t launch_reduce_kernel(const ReduceParams& params, bool is_double, cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    return cuda::launch(kernel, params.matrices, cuda::kWarpSize, 0, stream, /*uses_pdl=*/false, params);
  };
  if (params.dstate <= 16) {
    return is_double ? launch(&dense_reduce_kernel<double, 16>) : launch(&dense_reduce_kernel<float, 16>);
  }
  return is_double ? launch(&dense_reduce_kernel<double, 32>) : launch(&dense_reduce_kernel<float, 32>);
}

}  // namespace ssm_kernels::selective_scan::dense
