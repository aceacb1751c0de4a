// Parameters of the RMSNorm kernels, and the host functions that fill them in. entry.cpp chooses these kernels for calls
// without bias whose groups take whole warps and fit into one block or cluster.
#pragma once

#include "common/kernel_abi.h"
#include "norm/cuda/launch.h"

namespace ssm_kernels::norm {

// The rows of a tensor that a block steps through. Distances are in bytes.
struct RowStream {
  char* data = nullptr;          // null where the tensor is absent
  int64_t outer = 0, inner = 0;  // between rows
  int64_t step = 0;              // row_step rows on, within an outer row
  int64_t wrap = 0;              // added if a step passes the end of an outer row
  int64_t group = 0;             // between groups of a row
  int64_t block = 0;             // between blocks of a cluster
};

struct RmsParams {
  int rows = 0, inner = 1;  // fewer than kMaxNarrowRows
  int groups = 1, group_size = 0;
  int warps = 1;       // per block
  int cluster = 1;     // blocks that share a group of a row
  int row_step = 1;    // blocks or clusters that share the rows of a group
  int inner_step = 1;  // row_step % inner
  float inverse_size = 0, eps = 0;
  ParameterView weight;
  float* rstd = nullptr;
  const float* group_mean = nullptr;
  float* sums = nullptr;
};

// Reads: x, and z or residual. Writes: out, new_residual.
constexpr int kRmsFwdReads = 2, kRmsFwdWrites = 2;
// grad_out, x, z or grad_new_residual; grad_x, and grad_z or grad_residual; with a gate, and of aligned rows, also out.
constexpr int kRmsBwdReads = 3, kRmsBwdWrites = 3;
// Bytes per row that a thread copies besides its columns: rstd.
constexpr int kRmsBwdRowBytes = sizeof(float);

struct RmsFwdParams : RmsParams {
  RowStream reads[kRmsFwdReads], writes[kRmsFwdWrites];
};

struct RmsBwdParams : RmsParams {
  RowStream reads[kRmsBwdReads], writes[kRmsBwdWrites];
  float* partial_weight = nullptr;
};

// Pipeline stages, a row each: one in use, the others being copied. column_bytes is what a column of a row takes in all inputs.
// With more than 6 bytes, a third stage would cost resident blocks and leave no more bytes in flight.
constexpr int rms_stages(int column_bytes) { return column_bytes <= 6 ? 3 : 2; }
// Two buffers of a sum per warp.
constexpr int kRmsSumBytes = 2 * 32 * static_cast<int>(sizeof(float));
// row_bytes: bytes per row that a thread copies besides its columns.
constexpr int rms_shared_bytes(int warps, int column_bytes, int row_bytes) {
  return kRmsSumBytes + warps * kWarpSize * rms_stages(column_bytes) * (kThreadColumns * column_bytes + row_bytes);
}

// Shared memory of a cluster's sums: two buffers of a sum for each of its warps.
constexpr int kClusterSumBytes = 2 * cuda::kMaxClusterBlocks * 32 * static_cast<int>(sizeof(float));
// Extra shared memory of a shifted input beside its columns, per warp and stage.
constexpr int kShiftedInputBytes = kVectorBytes;

inline int bytes_of(const NormParams& p, bool is_accumulate) {
  if (p.kind == ScalarKind::kDouble) return 8;
  return p.kind == ScalarKind::kFloat || is_accumulate ? 4 : 2;
}

inline RowStream make_row_stream(const NormParams& p, const RmsPlan& plan, const RowsView& view) {
  const int64_t bytes = bytes_of(p, view.is_accumulate);
  RowStream stream;
  stream.data = static_cast<char*>(view.data);
  stream.outer = view.stride_outer * bytes;
  stream.inner = view.stride_inner * bytes;
  stream.step = plan.row_blocks / p.inner * stream.outer + plan.row_blocks % p.inner * stream.inner;
  stream.wrap = stream.outer - p.inner * stream.inner;
  stream.group = p.group_size * bytes;
  stream.block = int64_t(plan.warps) * kWarpSize * kThreadColumns * bytes;
  return stream;
}

inline void fill_rms_params(RmsParams& target, const NormParams& p, const RmsPlan& plan) {
  target.rows = static_cast<int>(p.rows());
  target.inner = static_cast<int>(p.inner);
  target.groups = static_cast<int>(p.groups);
  target.group_size = static_cast<int>(p.group_size);
  target.warps = plan.warps;
  target.cluster = plan.cluster;
  target.row_step = plan.row_blocks;
  target.inner_step = static_cast<int>(plan.row_blocks % p.inner);
  target.inverse_size = 1.0f / static_cast<float>(p.group_size);
  target.eps = static_cast<float>(p.eps);
  target.weight = p.weight;
  target.rstd = static_cast<float*>(p.rstd);
  target.group_mean = static_cast<const float*>(p.group_mean);
  target.sums = static_cast<float*>(p.sums);
}

inline RmsFwdParams make_rms_fwd_params(const NormFwdParams& params, const RmsPlan& plan) {
  RmsFwdParams p;
  fill_rms_params(p, params, plan);
  p.reads[0] = make_row_stream(params, plan, params.x);
  p.reads[1] = make_row_stream(params, plan, params.is_add ? params.residual : params.z);
  p.writes[0] = make_row_stream(params, plan, params.out);
  p.writes[1] = make_row_stream(params, plan, params.new_residual);
  return p;
}

// Instantiated for float, __half and __nv_bfloat16.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_norm_rms_fwd(const NormFwdParams& params, const RmsPlan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_norm_rms_bwd(const NormBwdParams& params, const RmsPlan& plan, cudaStream_t stream);
// How many clusters of a plan are resident on the current device, 0 if the query fails. Instantiated for the same types.
template <typename Scalar>
SSM_KERNEL_API int count_norm_rms_fwd_clusters(const RmsPlan& plan);
template <typename Scalar>
SSM_KERNEL_API int count_norm_rms_bwd_clusters(const RmsPlan& plan);

}  // namespace ssm_kernels::norm
