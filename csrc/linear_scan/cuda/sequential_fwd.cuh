// Linear scan, forward, on CUDA, for many chains: h_t = a_t h_{t-1} + b_t, one step after another. Tensors are (batch, seqlen,
// channels), channels are contiguous, and sequences are not packed.
//
// sequential.cuh describes how blocks, warps and lanes share the work. A lane keeps a and b of all steps of a segment in
// registers, replaces b by h as it takes the state through the steps, and stores h from there. Each input is read once and h
// written once. Nothing is saved for backward.
#pragma once

#include "linear_scan/cuda/sequential.cuh"

namespace ssm_kernels::linear_scan {

// 16 steps in 16-bit types, 8 in float32: a and b of two channels take 64 or 32 registers. Half as many with inputs that
// broadcast, which are loaded into registers, and in a kernel for several recurrences, which has no registers to spare.
template <typename Variant>
constexpr int kFwdRowBytes = Variant::kNames.size() > Variant::kFirstBroadcast || kIsAny<Variant> ? 16 : 32;
template <typename Scalar, typename Variant, SequentialRows rows>
using FwdSegment =
    Segment<Scalar, kFwdRowBytes<Variant> / static_cast<int>(sizeof(Scalar)), static_cast<int>(Variant::kFirstBroadcast), rows>;

template <typename Scalar, typename Variant, SequentialRows segment_rows>
__global__ void __launch_bounds__(kSequentialMaxWarps* cuda::kWarpSize, 1)
    linear_scan_sequential_fwd_kernel(const __grid_constant__ LinearScanFwdParams p,
                                      const __grid_constant__ SequentialPartition partition) {
  using S = FwdSegment<Scalar, Variant, segment_rows>;
  using Acc = typename S::Acc;
  using Inputs = SegmentInputs<S, Variant, true>;
  using ChainOf = Chain<S, true>;
  constexpr int kChannels = S::kLaneChannels;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const Variant variant = variant_of<Variant>(p);
  ChainOf chain(p, partition, memory, p.initial_state);

  CopiedRows<S, true> rows[Inputs::kStaged];
#pragma unroll
  for (int i = 0; i < Inputs::kStaged; ++i) rows[i] = CopiedRows<S, true>(p.inputs[i], chain);
  const auto view = [&](int i) { return p.inputs[i]; };
  const auto copy = [&](int segment, const StageRows<S>& stage) {
    const int steps = chain.steps(segment);
    if constexpr (S::kShifted) return copy_shifted_rows(chain, segment, stage, view, [&](int) { return steps; });
    const int lane = cuda::opaque(chain.lane);  // few values of the copies stay in registers
#pragma unroll
    for (int i = 0; i < Inputs::kStaged; ++i) rows[i].copy(p.inputs[i], chain, lane, steps, stage[i]);
  };

  chain.for_each_segment(copy, [&](int segment, const StageRows<S>& stage, const auto& release) {
    LaneRows<S, Inputs::kStaged> narrow;
    const int steps = chain.has_channels ? chain.steps(segment) : 0;
    Inputs inputs(p, chain, segment, steps, partition.reads_pairs);
    Acc a[S::kSteps][kChannels], h[S::kSteps][kChannels];  // h begins as b
    with_recurrence(variant, [&](const auto& recurrence) {
#pragma unroll
      for (int s = 0; s < S::kSteps; ++s) {
        if (s % narrow.kSteps == 0) narrow.load(partition, chain, segment, stage, s, [](int i) { return i; }, view);
        Acc x[kChannels][Inputs::kInputs];
        inputs.next(s, narrow, x);
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          const Step<Acc> step = recurrence.step(recurrence.gates(x[j]), x[j]);
          a[s][j] = step.a;
          h[s][j] = step.b;
        }
      }
    });
    release();

    Acc state[kChannels];
    chain.wait_for_state(segment, state);
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) state[j] = h[s][j] = Math<Acc>::fma(a[s][j], state[j], h[s][j]);
    }
    chain.pass_on(segment, state);

    store_rows<S, Scalar>(partition, p.h, chain, segment, chain.steps(segment), [&](int s) { return S::Row::round(h[s]); });
    if (chain.is_last(segment) && p.last_state.data != nullptr) {
#pragma unroll
      for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < kChannels; ++j) state[j] = s < steps ? h[s][j] : state[j];
      }
      chain.store_state(p.last_state, state);
    }
  });
  chain.finish();
}

template <typename Scalar>
cudaError_t launch_linear_scan_sequential_fwd(const LinearScanFwdParams& params, const SequentialPartition& partition,
                                              cudaStream_t stream) {
  return launch_sequential_variant<Scalar, true>(params, partition, [&](auto variant, auto rows) {
    using Variant = decltype(variant);
    constexpr SequentialRows kRows = decltype(rows)::value;
    return launch_chains<FwdSegment<Scalar, Variant, kRows>>(linear_scan_sequential_fwd_kernel<Scalar, Variant, kRows>,
                                                             kSequentialMaxWarps, params, partition, stream);
  });
}

}  // namespace ssm_kernels::linear_scan
