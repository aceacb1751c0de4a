// Linear scan, backward, on CUDA, for many chains: the gradients of the raw inputs, one step after another.
//
//   e_t = a_t g_t          g_t = grad_h_t + e_{t+1}
//   the input's gradients from g_t, h_{t-1} and the inputs, as the recurrence has them
//
// Tensors are (batch, seqlen, channels), channels are contiguous, and sequences are not packed. The scan runs from the last
// step to the first (position 0 is the last step) and starts from the gradient of the last state. sequential.cuh describes how
// blocks, warps and lanes share the work. A lane keeps the gates and grad_h of all steps of a segment in registers, replaces
// grad_h by g as it takes e through the steps, and then computes the gradients, which take the gates' and g's place. Each
// tensor is read once and each gradient written once; inputs that broadcast are read from global memory twice.
#pragma once

#include <utility>

#include "linear_scan/cuda/sequential.cuh"

namespace ssm_kernels::linear_scan {

// 8 steps in 16-bit types, 4 in float32, and 4 with gates of four values.
template <typename Scalar, typename Variant>
constexpr int kBwdSteps = Variant::kNames.size() <= 3 ? 16 / static_cast<int>(sizeof(Scalar)) : 4;
// A stage holds the inputs that backward reads, grad_h, and h one step earlier.
template <typename Scalar, typename Variant, SequentialRows rows>
using BwdSegment = Segment<Scalar, kBwdSteps<Scalar, Variant>, kStagedInputs<Variant, false> + 2, rows>;

// The rows of an input's gradient for one lane, stored one after another. Rows are vectors.
template <typename S>
struct StoredRows {
  using Scalar = typename S::Scalar;
  using Acc = typename S::Acc;

  char* target;
  int steps;  // that exist; none of a gradient that is not wanted
  bool is_accumulate;

  StoredRows() = default;
  __device__ __forceinline__ StoredRows(const SequenceView& view, const Chain<S, false>& chain, int segment, int steps,
                                        bool is_accumulate)
      : target(is_accumulate ? reinterpret_cast<char*>(chain.template element<Acc>(view, segment, chain.channel))
                             : reinterpret_cast<char*>(chain.template element<Scalar>(view, segment, chain.channel))),
        steps(view.data == nullptr ? 0 : steps),
        is_accumulate(is_accumulate) {}

  __device__ __forceinline__ void store_next(const SequenceView& view, int s, const Acc (&values)[S::kLaneChannels]) {
    if (s < steps) {
      if (is_accumulate) {
        cuda::Vector<Acc, S::kLaneChannels>::round(values).store_once(reinterpret_cast<Acc*>(target));
      } else {
        S::Row::round(values).store_once(reinterpret_cast<Scalar*>(target));
      }
    }
    target += Chain<S, false>::row_stride(view) * static_cast<int64_t>(is_accumulate ? sizeof(Acc) : sizeof(Scalar));
  }
};

// Warps of a multiprocessor: with gates of several values 128 registers a thread are too few.
template <typename Variant>
constexpr int kBwdWarps = Variant::kNames.size() <= 2 ? kSequentialMaxWarps : 12;

template <typename Scalar, typename Variant, SequentialRows segment_rows>
__global__ void __launch_bounds__(kBwdWarps<Variant>* cuda::kWarpSize, 1)
    linear_scan_sequential_bwd_kernel(const __grid_constant__ LinearScanBwdParams p,
                                      const __grid_constant__ SequentialPartition partition) {
  using S = BwdSegment<Scalar, Variant, segment_rows>;
  using Acc = typename S::Acc;
  using Inputs = SegmentInputs<S, Variant, false>;
  using ChainOf = Chain<S, false>;
  using Gates = decltype(std::declval<Variant>().gates(std::declval<const Acc*>()));
  constexpr int kChannels = S::kLaneChannels;
  constexpr int kGradH = Inputs::kStaged, kHBefore = kGradH + 1;  // their numbers in a stage
  static_assert(kHBefore + 1 == S::kTensors, "a stage holds the inputs, grad_h and h one step earlier");
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const Variant variant = make_variant<Variant>(p.options);
  ChainOf chain(p, partition, memory, p.grad_last_state);

  CopiedRows<S, false> rows[Inputs::kStaged];
#pragma unroll
  for (int i = 0; i < Inputs::kStaged; ++i) rows[i] = CopiedRows<S, false>(p.inputs[i], chain);
  CopiedRows<S, false> grad_h_rows(p.grad_h, chain), h_before_rows(p.h, chain, 1);
  const auto view = [&](int i) { return backward_view<Inputs::kStaged, Scalar>(p, i); };
  const auto copy = [&](int segment, const StageRows<S>& stage) {
    const int steps = chain.steps(segment);
    const int steps_with_before = chain.steps_until(p.seqlen - 1, segment);
    if constexpr (S::kShifted) {
      // Absent tensors have no steps.
      return copy_shifted_rows(chain, segment, stage, view, [&](int i) {
        return i == kHBefore ? steps_with_before : i == kGradH && p.grad_h.data == nullptr ? 0 : steps;
      });
    }
    const int lane = cuda::opaque(chain.lane);  // few values of the copies stay in registers
#pragma unroll
    for (int i = 0; i < Inputs::kStaged; ++i) rows[i].copy(p.inputs[i], chain, lane, steps, stage[i]);
    if (p.grad_h.data != nullptr) {
      grad_h_rows.copy(p.grad_h, chain, lane, steps, stage[kGradH]);
    } else {
      grad_h_rows.clear(lane, stage[kGradH]);
    }
    h_before_rows.copy(p.h, chain, lane, steps_with_before, stage[kHBefore]);
  };

  chain.for_each_segment(copy, [&](int segment, const StageRows<S>& stage, const auto& release) {
    const int steps = chain.has_channels ? chain.steps(segment) : 0;
    Inputs inputs(p, chain, segment, steps, partition.reads_pairs), inputs_again = inputs;
    LaneRows<S, Inputs::kStaged + 1> with_grad_h;
    Gates gates[S::kSteps][kChannels];
    Acc g[S::kSteps][kChannels];  // begins as grad_h
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      if (s % with_grad_h.kSteps == 0) with_grad_h.load(partition, chain, segment, stage, s, [](int i) { return i; }, view);
      Acc x[kChannels][Inputs::kInputs];
      inputs.next(s, with_grad_h, x);
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        gates[s][j] = variant.gates(x[j]);
        g[s][j] = with_grad_h.rows[kGradH][s % with_grad_h.kSteps].accumulate(j);
      }
    }

    const auto a = [&](int s, int j) {
      const Acc unused[Inputs::kInputs] = {};  // a follows from the gates
      return variant.step(gates[s][j], unused).a;
    };
    Acc e[kChannels];
    chain.wait_for_state(segment, e);
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        g[s][j] += e[j];
        e[j] = a(s, j) * g[s][j];
      }
    }
    chain.pass_on(segment, e);

    Acc initial[kChannels] = {};
    int first = -1;  // the position of the first step in the segment
    if (chain.is_last(segment)) {
      first = steps - 1;
      chain.load_state(p.initial_state, initial);
#pragma unroll
      for (int s = 0; s < S::kSteps; ++s) {
        if (s != first) continue;
#pragma unroll
        for (int j = 0; j < kChannels; ++j) e[j] = a(s, j) * g[s][j];
      }
      chain.store_state(p.grad_initial_state, e);
    }

    // Shifted rows are stored after the loop, because lanes exchange elements. Vectors are stored in it, between computations.
    [[maybe_unused]] StoredRows<S> out[Inputs::kInputs];
    if constexpr (!S::kShifted) {
#pragma unroll
      for (int i = 0; i < Inputs::kInputs; ++i) {
        out[i] = StoredRows<S>(p.grad_inputs[i], chain, segment, steps, i >= Inputs::kNarrow && p.grad_inputs[i].is_accumulate);
      }
    }
    LaneRows<S, Inputs::kStaged + 1> with_h;
    [[maybe_unused]] typename S::Row narrow[Inputs::kNarrow][S::kSteps];
    [[maybe_unused]] Acc wide[Inputs::kWide > 0 ? Inputs::kWide : 1][S::kSteps][kChannels];
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      if (s % with_h.kSteps == 0) {
        with_h.load(partition, chain, segment, stage, s, [](int i) { return i == kGradH ? kHBefore : i; }, view);
      }
      Acc x[kChannels][Inputs::kInputs], grads[Inputs::kInputs][kChannels];
      inputs_again.next(s, with_h, x);
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        const Acc before = s == first ? initial[j] : with_h.rows[Inputs::kStaged][s % with_h.kSteps].accumulate(j);
        Acc grad[Inputs::kInputs];
        variant.gradients(gates[s][j], x[j], before, g[s][j], grad);
#pragma unroll
        for (int i = 0; i < Inputs::kInputs; ++i) grads[i][j] = grad[i];
      }
      if constexpr (S::kShifted) {
#pragma unroll
        for (int i = 0; i < Inputs::kNarrow; ++i) narrow[i][s] = S::Row::round(grads[i]);
#pragma unroll
        for (int i = 0; i < Inputs::kWide; ++i) {
#pragma unroll
          for (int j = 0; j < kChannels; ++j) wide[i][s][j] = grads[Inputs::kNarrow + i][j];
        }
      } else {
#pragma unroll
        for (int i = 0; i < Inputs::kInputs; ++i) out[i].store_next(p.grad_inputs[i], s, grads[i]);
      }
    }
    release();
    if constexpr (S::kShifted) {
      const int rows_of_segment = chain.steps(segment);
#pragma unroll
      for (int i = 0; i < Inputs::kNarrow; ++i) {
        if (p.grad_inputs[i].data == nullptr) continue;
        store_rows<S, Scalar>(partition, p.grad_inputs[i], chain, segment, rows_of_segment,
                              [&](int s) { return narrow[i][s]; });
      }
#pragma unroll
      for (int i = 0; i < Inputs::kWide; ++i) {
        const SequenceView& wide_view = p.grad_inputs[Inputs::kNarrow + i];
        if (wide_view.data == nullptr) continue;
        if (wide_view.is_accumulate) {
          store_rows<S, Acc>(partition, wide_view, chain, segment, rows_of_segment,
                             [&](int s) { return cuda::Vector<Acc, kChannels>::round(wide[i][s]); });
        } else {
          store_rows<S, Scalar>(partition, wide_view, chain, segment, rows_of_segment,
                                [&](int s) { return S::Row::round(wide[i][s]); });
        }
      }
    }
  });
  chain.finish();
}

template <typename Scalar>
cudaError_t launch_linear_scan_sequential_bwd(const LinearScanBwdParams& params, const SequentialPartition& partition,
                                              cudaStream_t stream) {
  return launch_sequential_variant<Scalar, false>(params, partition, [&](auto variant, auto rows) {
    using Variant = decltype(variant);
    constexpr SequentialRows kRows = decltype(rows)::value;
    return launch_chains<BwdSegment<Scalar, Variant, kRows>>(linear_scan_sequential_bwd_kernel<Scalar, Variant, kRows>,
                                                             kBwdWarps<Variant>, params, partition, stream);
  });
}

}  // namespace ssm_kernels::linear_scan
