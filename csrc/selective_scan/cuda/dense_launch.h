// The interface between the CUDA entry point of selective_scan_dense (dense_entry.cpp) and its kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"
#include "selective_scan/dense.h"

namespace ssm_kernels::selective_scan::dense {

// The rows of the matrices of dense.h, and the channels of a tile.
constexpr int64_t padded_states(int64_t dstate) { return dstate <= 16 ? 16 : 32; }
constexpr int64_t kThreadChannels = 32;  // of the kernel with a channel to a thread
constexpr bool is_channel_fwd(int64_t dstate, bool is_double) { return dstate <= 16 && !is_double; }
constexpr int64_t fwd_channels(int64_t dstate, bool is_double) {
  return is_channel_fwd(dstate, is_double) ? kThreadChannels : dstate > 16 ? 4 : 8;
}
constexpr int64_t bwd_channels(int64_t dstate) { return dstate > 16 ? 4 : 8; }

// Matrices A, (matrices, dstate, dstate) with these strides, in float or double. `result` is (4, matrices, padded, padded): T,
// Q and their transposes.
struct ReduceParams {
  const void* A = nullptr;
  int64_t matrices = 0, dstate = 0, stride_matrix = 0, stride_row = 0, stride_column = 0;
  void* result = nullptr;
};
SSM_KERNEL_STRUCT(ReduceParams, 56);

SSM_KERNEL_API cudaError_t launch_reduce(const ReduceParams& params, bool is_double, cudaStream_t stream);
SSM_KERNEL_API cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const DenseParams& dense, ScalarKind kind,
                                      cudaStream_t stream);
SSM_KERNEL_API cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const DenseParams& dense, const DenseSums& sums,
                                      ScalarKind kind, cudaStream_t stream);

}  // namespace ssm_kernels::selective_scan::dense
