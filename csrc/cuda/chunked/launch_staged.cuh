// Launches of kernels with a pipeline of stages, and the choice of a kernel by the columns of a state and by its matrix
// products.
#pragma once

#include "cuda/chunked/geometry.h"
#include "cuda/launch.cuh"
#include "cuda/mma_policy.cuh"

namespace ssm_kernels::cuda::chunked {

// Launches a kernel with as many stages as fit in `available` bytes of shared memory, but at least one: bytes_of(stages).
template <typename Kernel, typename Params, typename Work, typename BytesOf>
cudaError_t launch_staged(Kernel kernel, int64_t blocks, int threads, int max_stages, const BytesOf& bytes_of, int available,
                          cudaStream_t stream, const Params& params, Work work, bool uses_pdl = false) {
  work.stages = max_stages;
  while (work.stages > 1 && bytes_of(work.stages) > available) --work.stages;
  const int bytes = bytes_of(work.stages);
  if (const cudaError_t error = allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return launch(kernel, blocks, threads, bytes, stream, uses_pdl, params, work);
}

// Returns launch(columns, mma) for kernels with states of up to `columns` columns, at most max_columns, and an MMA policy.
// rounds_fp32: whether there are kernels that round fp32 operands to TF32. Without them, 3xTF32 takes their place.
template <typename Scalar, int max_columns, bool rounds_fp32 = true, typename Launch>
cudaError_t visit_kernels(int dstate, Products products, const Launch& launch) {
  const auto visit_policies = [&](auto columns) -> cudaError_t {
    if constexpr (kIsFp32<Scalar> && rounds_fp32) {
      if (products == Products::kTf32) return launch(columns, Sm80Tf32());
    } else if constexpr (!kIsFp32<Scalar>) {
      if (products == Products::kWgmma) return launch(columns, Sm90Wgmma());
    }
    return launch(columns, Sm80Mma());
  };
  if (dstate <= 64) return visit_policies(std::integral_constant<int, 64>());
  if (dstate <= kStateColumns) return visit_policies(std::integral_constant<int, kStateColumns>());
  return visit_policies(std::integral_constant<int, max_columns>());
}

}  // namespace ssm_kernels::cuda::chunked
