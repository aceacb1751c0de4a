// The summary of a span of steps and the gradient of the state before it, on CUDA: what they compute besides the carry pass
// (launch.h, segment_maps.h), which finds the maps of the state of all segments, or of its adjoint. Where Abar is an
// exponential, the decay is not the product of the segments' decays, whose error grows with their number, but e^(A sum of
// delta) (cuda/span_decay.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

// The maps of a carry pass's segments, (batch, segments, dim, dstate), folded into one: the state after all of them from zero
// (of an adjoint: the one before all of them), and the product of their decays. The results are (batch, dim, dstate),
// contiguous; `product` may be null.
struct SegmentFold {
  const void* decay = nullptr;
  const void* offset = nullptr;
  int64_t segments = 1;
  bool is_adjoint = false;
  void* state = nullptr;
  void* product = nullptr;
};
template <typename Acc>
SSM_KERNEL_API cudaError_t launch_fold(const SelectiveScanParams& params, const SegmentFold& fold, cudaStream_t stream);

SSM_KERNEL_STRUCT(SegmentFold, 48);

}  // namespace ssm_kernels::selective_scan
