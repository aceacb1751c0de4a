// States, maps of segments, and partial sums of the gradients of B and C in global memory.
#pragma once

#include "common/limits.h"
#include "cuda/carry.cuh"
#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/position.cuh"

namespace ssm_kernels::selective_scan {

template <typename Acc>
__device__ __forceinline__ Acc load_state(const StateView& view, int64_t row, int64_t channel, int state) {
  return static_cast<const Acc*>(view.data)[row * view.stride_batch + channel * view.stride_dim + state * view.stride_state];
}
// The same of a tensor that may be absent and of a row that may be -1: zero.
template <typename Acc>
__device__ __forceinline__ Acc load_optional_state(const StateView& view, int64_t row, int64_t channel, int state) {
  return view.data != nullptr && row >= 0 ? load_state<Acc>(view, row, channel, state) : Acc(0);
}

// A of a backward kernel. NaN stays, and so does a positive infinity, beside which nothing is finite.
template <typename Acc>
__device__ __forceinline__ Acc load_bounded_A(const SelectiveScanParams& p, int64_t d, int64_t state,
                                              Acc largest = kLargestRate<Acc>) {
  const Acc A = load_state<Acc>(p.A, 0, d, state);
  return A < -largest ? -largest : A;
}

// Folds a segment's map, of the carry pass, into a state; in backward into the adjoint of one. A state of zero needs no decay,
// so none is loaded.
template <typename Acc>
__device__ __forceinline__ Acc fold_segment(const ChannelPartition& partition, int64_t index, Acc state) {
  const Acc offset = static_cast<const Acc*>(partition.offset)[index];
  return state == 0 ? offset : cuda::AffineMap<Acc>{static_cast<const Acc*>(partition.decay)[index], offset}(state);
}

// Stores a block's partial sum of grad_B or grad_C for one state and `size` steps from `step` on, of which `valid` exist. If
// the group is one tile, the sum is complete and goes to the gradient itself.
template <typename Scalar, typename Acc, int size>
__device__ __forceinline__ void store_matrix_sum(const SelectiveScanBwdParams& p, const PartialSums& partial_sums,
                                                 const Position& at, bool is_B, int state, int64_t step, int valid,
                                                 const Vector<Acc, size>& sum) {
  Acc* const partial = static_cast<Acc*>(is_B ? partial_sums.grad_B : partial_sums.grad_C);
  if (partial != nullptr) {
    Acc* const target = partial + partial_sums.offset(at.batch, at.tile, state, at.first_step + step);
    if (at.is_packed) {
      // The next sequence's sums follow, at any alignment.
#pragma unroll
      for (int j = 0; j < size; ++j) {
        if (j < valid) target[j] = sum[j];
      }
    } else {
      sum.store_once(target);
    }
  } else if (const MatrixView& target = is_B ? p.grad_B : p.grad_C; target.per_step) {
    const int64_t group = at.first_channel / (p.dim / target.groups);
    Scalar* const grad = static_cast<Scalar*>(target.data) + at.batch * target.stride_batch + group * target.stride_channel +
                         state * target.stride_state + (at.first_step + step) * target.stride_step;
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if (j < valid) grad[j * target.stride_step] = from_accumulate<Scalar>(sum[j]);
    }
  }
}

}  // namespace ssm_kernels::selective_scan
