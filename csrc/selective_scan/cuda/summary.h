// The summary of a span of steps and the gradient of the state before it, on CUDA: what they compute besides the carry pass
// (launch.h), which finds the maps of the state of all segments, or of its adjoint.
//
// Two or more segments are folded into one map. Where Abar is an exponential, the decay is not the product of the segments'
// decays, whose error grows with their number, but e^(A sum of delta): a kernel sums the step sizes of each channel in double,
// kSumSteps of them per block, and another adds these sums in a fixed order and takes the exponential.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/integers.h"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

// Steps of a partial sum. It depends on no other size, so that a row's bits do not depend on its batch.
constexpr int64_t kSumSteps = 1024;

inline int64_t step_sums_per_channel(const SelectiveScanParams& p) { return ceil_div(p.seqlen, kSumSteps); }

// decay, (batch, dim, dstate), contiguous, of an exponential transition. `sums` is a workspace for (batch, dim,
// step_sums_per_channel).
template <typename Scalar>
cudaError_t launch_exponential_decay(const SelectiveScanParams& params, double* sums, void* decay, cudaStream_t stream);

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
cudaError_t launch_fold(const SelectiveScanParams& params, const SegmentFold& fold, cudaStream_t stream);

}  // namespace ssm_kernels::selective_scan
