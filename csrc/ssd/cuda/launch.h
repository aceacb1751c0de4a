// The interface between the host code that launches the SSD kernels (launch_fwd.cpp, launch_bwd.cpp) and the kernels: what
// they need of the device, and launchers. geometry.h has the sizes, and how blocks share the work.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "cuda/chunked/geometry.h"
#include "cuda/divisor.h"
#include "ssd/ssd.h"

namespace ssm_kernels::ssd {

// The least shared memory with which every mma.sync kernel of a direction runs. Backward's kernels take up to kStateColumns
// columns.
constexpr int least_shared_bytes(int64_t dstate, bool is_fp32, bool is_backward, bool has_diagonal_gain = false) {
  if (!is_fp32) return dstate > kStateColumns ? 146 * 1024 : kMinSharedBytes;
  const int more_tables = has_diagonal_gain && !is_backward ? 6 : 0;
  return ((dstate > kStateColumns || (is_backward && dstate > 64) ? 190 : 142) + more_tables) * 1024;
}

// The shared memory that a block can have on every device that takes the call.
template <typename Scalar, typename Mma>
constexpr int certain_shared_bytes(int dstate, bool is_backward, bool has_diagonal_gain = false) {
  return Mma::kIsAsync ? kSm90SharedBytes : least_shared_bytes(dstate, kIsFp32<Scalar>, is_backward, has_diagonal_gain);
}

// Columns of a state that backward takes at a time if a block can have that much shared memory.
constexpr int64_t backward_columns(bool is_fp32, int max_shared_bytes) {
  return max_shared_bytes >= least_shared_bytes(kStateColumns, is_fp32, /*is_backward=*/true) ? kStateColumns : 64;
}

// The sequential scan of short fp32 sequences (short_scan_fwd.cuh): the most steps it takes, and a block's rows of a head's
// state.
constexpr int kShortSteps = 32, kShortRows = 16;
inline int64_t short_blocks(const SsdParams& p) { return p.batch * p.heads * ((p.headdim + kShortRows - 1) / kShortRows); }

// Rows as in x. y and grad_z are null if the gradient of z is not needed.
struct GateBwdParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  int headdim = 0;
  cuda::Divisor vectors_per_head;
  bool are_shifted = false;  // whether rows of grad_out, z or grad_z begin between multiples of 16 bytes, or are no multiples
  RowsView grad_out, z, y, grad_y, grad_z;
};

// Queue the kernels on the stream. Instantiated for float, __half and __nv_bfloat16. The parameters say which gates.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_fwd(const SsdFwdParams& params, const Schedule& schedule, Products products,
                                          int max_shared_bytes, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_fwd(const SsdLogFwdParams& params, const Schedule& schedule, Products products,
                                          int max_shared_bytes, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_fwd(const SsdDiagonalFwdParams& params, const Schedule& schedule, Products products,
                                          int max_shared_bytes, cudaStream_t stream);
// For __half and __nv_bfloat16, dstate 64 or 128, sequences that are not packed, without resets and chunk states, and a
// schedule that splits no work tile. B and C are rows of groups; angles and phases have vectors of 4 elements.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_rotated_fwd(const SsdRotatedFwdParams& params, const Schedule& schedule,
                                                  int max_shared_bytes, cudaStream_t stream);
SSM_KERNEL_API cudaError_t launch_ssd_short_scan_fwd(const SsdFwdParams& params, cudaStream_t stream);  // fp32
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_bwd(const SsdBwdParams& params, const WorkPartition& partition, Products products,
                                          int max_shared_bytes, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_bwd(const SsdLogBwdParams& params, const WorkPartition& partition, Products products,
                                          int max_shared_bytes, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_bwd(const SsdDiagonalBwdParams& params, const WorkPartition& partition, Products products,
                                          int max_shared_bytes, cudaStream_t stream);
// Writes the states after a span, begun with the initial states, in the partition's one direction: (batch, heads, headdim,
// dstate).
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_span_states(const SsdBwdParams& params, const WorkPartition& partition, float* states,
                                                  Products products, int max_shared_bytes, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_span_states(const SsdLogBwdParams& params, const WorkPartition& partition, float* states,
                                                  Products products, int max_shared_bytes, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_ssd_bwd_gate(const GateBwdParams& params, int blocks, cudaStream_t stream);

// Whether the library has kernels with wgmma, of fp16 and bf16, for the current device.
SSM_KERNEL_API bool has_wgmma_kernels();

SSM_KERNEL_STRUCT(GateBwdParams, 216);

}  // namespace ssm_kernels::ssd
