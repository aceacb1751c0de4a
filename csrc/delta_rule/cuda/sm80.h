// Parameters of the delta rule's kernels with mma.sync (sm80_chunk.cuh), and the bytes that they need.
#pragma once

#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

// Parameters of all of the kernels; `element_bytes` of q, k, v and the workspaces is 2 or 4. The kernels do not read the
// descriptors.
struct DeltaRuleSm80Params : DeltaRuleBwdParams {
  RowsView q, k, v;        // rows of whole vectors of 16 bytes, as those of out and grad_out
  RowsView out, grad_out;  // of forward and of backward
  // Elements from the terms of the gradients of log decays of one part of the keys' columns to those of the next part.
  int64_t grad_log_decay_stride_part = 0;
  int multiprocessors = 1;  // of the device
};
SSM_KERNEL_STRUCT(DeltaRuleSm80Params, 1920);

// Columns of the keys that a block of the gradients' kernel takes, and how many parts these make.
SSM_HOST_DEVICE constexpr int sm80_gradient_columns(int64_t dstate, int64_t element_bytes) {
  return element_bytes == 4 || dstate <= 64 ? 64 : kStateColumns;
}
SSM_HOST_DEVICE constexpr int64_t sm80_column_parts(int64_t dstate, int64_t element_bytes) {
  const int columns = sm80_gradient_columns(dstate, element_bytes);
  return (dstate + columns - 1) / columns;
}

// Bytes of the matrices of a chunk of a value head: N, as a hi/lo split of 16 bits or in fp32, P, and the tables.
SSM_HOST_DEVICE constexpr int64_t sm80_matrices_bytes(int64_t element_bytes) {
  return element_bytes == 4 ? 2 * kChunk * kChunk * 4 + 19 * 128 : 3 * kChunk * kChunk * 2 + 17 * 128;
}
// Bytes of backward's states of a chunk and 64 rows of V: two state tiles and two tiles of steps.
SSM_HOST_DEVICE constexpr int64_t sm80_states_bytes(int64_t columns, int64_t element_bytes) {
  return 2 * kStateRows * (columns + kChunk) * element_bytes;
}

// Bytes of shared memory of a block of the scans, with one stage, and of the gradients' kernel.
constexpr int64_t sm80_scan_bytes(int64_t columns, int64_t element_bytes, int warpgroups) {
  return kChunk * (2 * columns + warpgroups * kStateRows) * element_bytes + sm80_matrices_bytes(element_bytes);
}
constexpr int64_t sm80_gradients_bytes(int64_t dstate, int64_t element_bytes) {
  return kChunk * (3 * sm80_gradient_columns(dstate, element_bytes) + 5 * kChunk) * element_bytes + 5 * 1024;
}

// Queue the kernels, for __half, __nv_bfloat16 and float. `available` is the shared memory of a block of the device.
//
// The matrices of all chunks:
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_sm80_matrices(const DeltaRuleSm80Params& params, cudaStream_t stream);
// Forward, after the matrices:
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_sm80_fwd(const DeltaRuleSm80Params& params, const WorkPartition& partition,
                                                      int available, cudaStream_t stream);
// Backward, after the matrices: the states, unless partition.directions is kForward their gradients, and with a workspace of
// states the gradients of all steps.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_delta_rule_sm80_bwd(const DeltaRuleSm80Params& params, const WorkPartition& partition,
                                                      int available, cudaStream_t stream);

}  // namespace ssm_kernels::delta_rule
