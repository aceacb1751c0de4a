// Interface between the host code of scans with ranks (ranks.cpp) and their elementwise kernels (ranks.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "cuda/chunked/geometry.h"

namespace ssm_kernels::ssd {

constexpr int kMaxRanks = 8;
// Threads of a block, and elements of a row that a thread has at a time.
constexpr int kRankThreads = 128, kRankElements = 4;

// Sequences x, z and out, (batch, seqlen, heads, headdim), with contiguous rows; `rows`, (batch, seqlen rows_of_step, heads,
// headdim), of which a step's first `ranks` are its ranks; factors (heads, ranks, headdim), fp32, or null: 1.
struct RankParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  int headdim = 0, ranks = 0, rows_of_step = 0;
  int parts = 0;             // blocks that share the steps of a head
  bool are_vectors = false;  // whether kRankElements elements of all sequences begin at multiples of their size
  float norm_eps = 0;
  cuda::chunked::RowsView x, z, out, rows;  // z: null without a gate
  const float *x_factor = nullptr, *z_factor = nullptr, *out_factor = nullptr;
  const float* norm_weight = nullptr;  // (heads, headdim), or null: no norm
};
// Null if not needed: grad_x, grad_z and the parts, (parts, heads, ranks, headdim).
struct RankBwdParams : RankParams {
  cuda::chunked::RowsView grad_rows, grad_x, grad_z;
  float *x_parts = nullptr, *z_parts = nullptr, *out_parts = nullptr, *norm_parts = nullptr;
};

// Instantiated for float, __half and __nv_bfloat16. From x to rows; from rows to out; from the gradient of `out`, in its place,
// to grad_rows; from grad_rows to grad_x.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_rank_inputs(const RankParams& params, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_rank_outputs(const RankParams& params, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_rank_outputs_bwd(const RankBwdParams& params, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_rank_inputs_bwd(const RankBwdParams& params, cudaStream_t stream);

SSM_KERNEL_STRUCT(RankParams, 208);
SSM_KERNEL_STRUCT(RankBwdParams, 336);

}  // namespace ssm_kernels::ssd
