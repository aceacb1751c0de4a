// Launches of the selective scan of complex states (complex_scan.cuh), which plans its own blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

// Memory of a launch of backward, in the accumulation type. Null where nothing needs it.
struct ComplexWorkspace {
  void* adjoint = nullptr;   // (rows, dim, dstate)
  void* previous = nullptr;  // the same: the gradient of the sample before a chunk
  void* sums = nullptr;      // (4, batch, dim, seqlen): u, delta, y and lam, with more states than a block takes in one pass
};
SSM_KERNEL_STRUCT(ComplexWorkspace, 24);

// The blocks of backward: tiles of channels of each row, and passes over the states.
struct ComplexBlocks {
  int64_t tiles = 0, passes = 1;
};
SSM_KERNEL_STRUCT(ComplexBlocks, 16);

template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_complex_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two,
                                              cudaStream_t stream);
// `shared_bytes`: what a block may have on the device.
template <typename Scalar>
SSM_KERNEL_API ComplexBlocks complex_bwd_blocks(const SelectiveScanBwdParams& params, int64_t shared_bytes);
// `partial.tiles` are those of complex_bwd_blocks().
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_complex_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two,
                                              const PartialSums& partial, const ComplexWorkspace& workspace,
                                              int64_t shared_bytes, cudaStream_t stream);

}  // namespace ssm_kernels::selective_scan
