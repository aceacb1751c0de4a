// The sample before a step, and the weights of two samples, for kernels of the methods in two_sample_forms.cuh.
//
// Kernels never shift a tensor: a block reads the sample before its first step from memory, one element a channel and one a
// state. The sample before a row's first step is the caller's, the row's first one, or zero (selective_scan.h).
#pragma once

#include "common/activations.h"
#include "cuda/shifted_io.cuh"
#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/transition.cuh"

namespace ssm_kernels::selective_scan {

// Elements from the data of a tensor to its first step: data of descending vectors points at the vector that ends there.
template <typename Scalar>
__device__ __forceinline__ int first_element(VectorAccess access) {
  return access == VectorAccess::kDescending ? kVectorSize<Scalar> - 1 : 0;
}

// Whether the sample before the row's first step is its first one.
__device__ __forceinline__ bool repeats_first(const TwoSampleParams& two, const Position& at) {
  return two.repeats_first && (two.previous_u.data == nullptr || at.initial < 0);
}

// The address of u before step t0 of the row, which exists, of a channel of the block; null if it is zero. `row` is that of the
// block's first channel.
template <typename Scalar>
__device__ __forceinline__ const Scalar* u_address_before(const SelectiveScanParams& p, const TwoSampleParams& two,
                                                          const Position& at, VectorAccess access, const Scalar* row,
                                                          int channel, int64_t t0) {
  const Scalar* const first = row + first_element<Scalar>(access) + channel * p.u.stride_dim;
  if (t0 > 0) return first + (t0 - 1) * p.u.stride_step;
  if (two.previous_u.data != nullptr && at.initial >= 0) {
    const int64_t offset = at.initial * two.previous_u.stride_batch + (at.first_channel + channel) * two.previous_u.stride_dim;
    return static_cast<const Scalar*>(two.previous_u.data) + offset;
  }
  return repeats_first(two, at) ? first : nullptr;
}

// The same of B, which is per step. `row` is that of the first state of the block's group.
template <typename Scalar>
__device__ __forceinline__ const Scalar* B_address_before(const SelectiveScanParams& p, const TwoSampleParams& two,
                                                          const Position& at, VectorAccess access, const Scalar* row, int state,
                                                          int64_t t0) {
  const Scalar* const first = row + first_element<Scalar>(access) + state * p.B.stride_state;
  if (t0 > 0) return first + (t0 - 1) * p.B.stride_step;
  if (two.previous_B.data != nullptr && at.initial >= 0) {
    const int64_t group = at.first_channel / (p.dim / p.B.groups);
    const int64_t offset =
        at.initial * two.previous_B.stride_batch + group * two.previous_B.stride_dim + state * two.previous_B.stride_state;
    return static_cast<const Scalar*>(two.previous_B.data) + offset;
  }
  return repeats_first(two, at) ? first : nullptr;
}

// The element at such an address: unconverted, so that a caller does not wait for it.
template <typename Scalar>
__device__ __forceinline__ Scalar load_or_zero(const Scalar* element) {
  return element != nullptr ? *element : from_accumulate<Scalar>(AccumulateType<Scalar>(0));
}

// An element of lam, from its address.
template <typename Scalar>
__device__ __forceinline__ AccumulateType<Scalar> load_lam(const TwoSampleParams& two, const Scalar* element) {
  const AccumulateType<Scalar> raw = to_accumulate(*element);
  return two.lam_sigmoid ? sigmoid(raw) : raw;
}

__device__ __forceinline__ bool is_bilinear(const SelectiveScanParams& p) {
  return p.discretization == Discretization::kTrapezoidal || p.discretization == Discretization::kGbtTwoSample;
}

// The weight of a step's own sample where it is not lam. The true first-order hold has none.
template <typename Acc>
__device__ __forceinline__ Acc constant_weight(const SelectiveScanParams& p, const TwoSampleParams& two) {
  return p.discretization == Discretization::kTrapezoidal ? Acc(0.5) : static_cast<Acc>(two.method.alpha);
}

// delta lam and delta (1 - lam), the step sizes of the two samples.
template <typename Acc>
struct SampleSteps {
  Acc current, previous;

  __device__ __forceinline__ SampleSteps(bool is_weighted, Acc delta, Acc weight)
      : current(is_weighted ? delta * weight : delta), previous(is_weighted ? delta - current : delta) {}
};

}  // namespace ssm_kernels::selective_scan
