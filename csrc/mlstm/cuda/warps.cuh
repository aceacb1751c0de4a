// Shared by the kernels of mlstm_scan and mlstm_step: loads of gates, and launches of one warp for each row.
#pragma once

#include <cuda_runtime.h>

#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"

namespace ssm_kernels::mlstm {

// An element of a tensor of the inputs' type or of the accumulation type. View: GateView or step::TokenView.
template <typename Scalar, typename View>
__device__ __forceinline__ cuda::AccumulateType<Scalar> load_gate(const View& view, int64_t offset) {
  if (view.is_input_kind) return cuda::to_accumulate(static_cast<const Scalar*>(view.data)[offset]);
  return static_cast<const cuda::AccumulateType<Scalar>*>(view.data)[offset];
}

// The number of this warp, in launches whose blocks have `warps` warps and whose first warp has the number `first`.
template <int warps>
__device__ __forceinline__ int64_t warp_number(int64_t first) {
  return first + static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / cuda::kWarpSize;
}

// Launches a kernel for `count` warps, in grids of a limited size. The kernel's last argument is the number of the first warp.
template <int warps, typename Kernel, typename... Arguments>
cudaError_t launch_warps(Kernel* kernel, int64_t count, cudaStream_t stream, const Arguments&... arguments) {
  constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;
  for (int64_t first = 0; first < count; first += kMostBlocks * warps) {
    const int64_t left = (count - first + warps - 1) / warps, blocks = left < kMostBlocks ? left : kMostBlocks;
    const cudaError_t error = cuda::launch(kernel, blocks, warps * cuda::kWarpSize, 0, stream, false, arguments..., first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ssm_kernels::mlstm
