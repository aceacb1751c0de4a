// The fold of a carry pass's segments into the summary, or into the gradient of the state before all steps, one thread for each
// state.
#pragma once

#include "common/integers.h"
#include "selective_scan/cuda/states.cuh"
#include "selective_scan/cuda/summary.h"

namespace ssm_kernels::selective_scan {

constexpr int kSummaryThreads = 256;

template <typename Acc>
__global__ void __launch_bounds__(kSummaryThreads)
    fold_segments_kernel(const __grid_constant__ SegmentFold fold, int64_t rows, int64_t states) {
  const int64_t i = int64_t(blockIdx.x) * kSummaryThreads + threadIdx.x;
  if (i >= rows * states) return;
  const int64_t row = i / states, first = (row * fold.segments - row) * states + i;  // of the row's first segment
  Acc state = 0, product = 1;
#pragma unroll 4
  for (int64_t k = 0; k < fold.segments; ++k) {
    const int64_t index = first + (fold.is_adjoint ? fold.segments - 1 - k : k) * states;
    const cuda::AffineMap<Acc> map{static_cast<const Acc*>(fold.decay)[index], static_cast<const Acc*>(fold.offset)[index]};
    state = map(state);
    // A decay of zero stays zero, even if that of another segment has overflowed.
    product = product == 0 ? product : product * map.decay;
  }
  static_cast<Acc*>(fold.state)[i] = state;
  if (fold.product != nullptr) static_cast<Acc*>(fold.product)[i] = product;
}

template <typename Acc>
cudaError_t launch_fold(const SelectiveScanParams& p, const SegmentFold& fold, cudaStream_t stream) {
  const int64_t states = p.dim * p.dstate;
  return cuda::launch(fold_segments_kernel<Acc>, ceil_div(p.batch * states, kSummaryThreads), kSummaryThreads, 0, stream,
                      /*uses_pdl=*/false, fold, p.batch, states);
}

}  // namespace ssm_kernels::selective_scan
