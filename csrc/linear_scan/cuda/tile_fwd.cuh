// Linear scan, forward, on CUDA: h_t = a_t h_{t-1} + b_t in one pass over memory. Tensors are (batch, seqlen, channels).
//
// launch.h describes tiles, chains and blocks; tile.cuh, how a block's tiles follow one another; nothing is saved for
// backward. A thread copies its steps of the raw inputs to shared memory asynchronously, kVector channels at a time. From there
// it computes the gates, a and b, and from them the affine map of its steps (reduce). It gets the state before its first step
// (tile_carry.cuh), takes a and b from reduce or computes them again, advances the state through its steps and writes h
// (apply). Each input is read once and h written once; in tiles that are not plain, inputs that broadcast are read from global
// memory twice. A thread reads only what it copied itself, so the copies need no barrier. Rows of plain tiles may start at any
// element, in kernels of their own: the lanes of a row then move its elements to where an aligned row has them, and a warp
// stores h, row by row, from shared memory (shifted_rows.cuh).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "linear_scan/cuda/tile.cuh"

namespace ssm_kernels::linear_scan {

// Whether a kernel of any rows keeps gates in registers from reduce to apply: those of three inputs that do not broadcast.
// Gates of inputs that broadcast take too many registers.
template <typename Variant, bool is_plain>
constexpr bool kKeepsGatesOf = !is_plain && Variant::kNames.size() == 3 && Variant::kFirstBroadcast == 3;
// Whether a and b pass from reduce to apply: gates of three and four inputs are expensive, and their inputs that broadcast
// would be loaded again. Others are computed again from the raw inputs, which take half the registers.
template <typename Variant, bool is_plain>
constexpr bool kPassesCoefficients = Variant::kNames.size() > 2 && !kKeepsGatesOf<Variant, is_plain>;
// Rows that hold one row of a, or of b.
template <typename Scalar>
constexpr int kCoefficientRows = static_cast<int>(sizeof(cuda::AccumulateType<Scalar>) / sizeof(Scalar));

template <typename Scalar, typename Variant, TileRows tile_rows>
using FwdTile = Tile<Scalar, fwd_thread_steps(static_cast<int>(Variant::kNames.size()), sizeof(Scalar)),
                     std::max(kStagedInputs<Variant, true>,
                              kPassesCoefficients<Variant, tile_rows != TileRows::kAny> ? 2 * kCoefficientRows<Scalar> : 0),
                     tile_rows, true>;
constexpr int kFwdBlocks = 3;

template <typename Scalar, typename Variant, TileRows tile_rows>
__global__ void __launch_bounds__(kThreads, kFwdBlocks)
    linear_scan_fwd_kernel(const __grid_constant__ LinearScanFwdParams p, const __grid_constant__ Partition partition) {
  using T = FwdTile<Scalar, Variant, tile_rows>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  using Row = typename Shared<T>::Row;
  using Gates = decltype(std::declval<Variant>().gates(std::declval<const Acc*>()));
  constexpr bool kPasses = kPassesCoefficients<Variant, T::kPlain>, kKeepsGates = kKeepsGatesOf<Variant, T::kPlain>;
  constexpr int kCoefficients = kCoefficientRows<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  const Variant variant = variant_of<Variant>(p);
  const int staged = staged_inputs_of<Variant, true>(p);
  [[maybe_unused]] Gates gates[kKeepsGates ? T::kThreadSteps : 1][T::kVector];

  const auto view = [&](int i) { return p.inputs[i]; };
  const ShiftedTile<T, Inputs::kStaged, decltype(view)> shifted{shared, p, view};
  const auto stage = [&](const ThreadTile<T>& at, int buffer) {
    if constexpr (T::kShifted) return shifted.copy(at, buffer, [&](int) { return at.steps; });
    const SharedRows<T> target{shared, buffer};
    Rows<T> rows[Inputs::kStaged];
#pragma unroll
    for (int i = 0; i < Inputs::kStaged; ++i) rows[i] = Rows<T>(p.inputs[i], partition, Partition::kInputs + i, at);
    for_each_step<T, false, T::kThreadSteps / 2>(
        at.steps, [&](int s, auto) { stage_inputs<Variant>(rows, staged, s < at.steps, target, s); });
  };

  const auto reduce = [&](const ThreadTile<T>& at, const SharedRows<T>& rows, Map<Acc>(&own)[T::kVector]) {
    ThreadInputs<T, Variant> inputs(p, partition, at);
    bool is_reset = false;
    for_each_step<T, kKeepsGates, T::kThreadSteps / 2>(at.steps, [&](int s, auto keeps) {
      if constexpr (!T::kPlain) {
        const int64_t t = at.step(s);
        if (p.begins(at.batch, t)) {
          Acc initial[T::kVector];
          load_state<T>(p.initial_state, p.sequence(at.batch, t), at, initial);
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) own[j] = {0, initial[j]};
          is_reset = true;
        }
      }
      const Inputs step_inputs = inputs.next(s, rows);
      [[maybe_unused]] cuda::Vector<Acc, T::kVector> coefficients[2];
      with_recurrence(variant, [&](const auto& recurrence) {
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) {
          Acc x[Inputs::kInputs];
          step_inputs.get(j, x);
          const auto made = recurrence.gates(x);
          const Step<Acc> step = recurrence.step(made, x);
          own[j] = {own[j].decay * step.a, Math<Acc>::fma(step.a, own[j].offset, step.b)};
          if constexpr (decltype(keeps)::value) gates[s][j] = made;
          if constexpr (kPasses) {
            coefficients[0].set(j, step.a);
            coefficients[1].set(j, step.b);
          }
        }
      });
      if constexpr (kPasses) {
#pragma unroll
        for (int i = 0; i < 2 * kCoefficients; ++i) {
          memcpy(&rows(i, s), coefficients[i / kCoefficients].accesses + i % kCoefficients, sizeof(Row));
        }
      }
    });
    return is_reset;
  };

  // Where rows are shifted, finish(s, row) gets the results.
  const auto apply_steps = [&](const ThreadTile<T>& at, const auto& rows, Acc(&h)[T::kVector], const auto& finish) {
    ThreadInputs<T, Variant> inputs(p, partition, at);
    Rows<T> out(p.h, partition, Partition::kH, at);
    for_each_step<T, kKeepsGates>(at.steps, [&](int s, auto keeps) {
      if constexpr (!T::kPlain) {
        const int64_t t = at.step(s);
        if (p.begins(at.batch, t)) load_state<T>(p.initial_state, p.sequence(at.batch, t), at, h);
      }
      if (T::kPlain && s >= at.steps) {  // a branch, which keeps the instructions of several steps apart
        if constexpr (T::kShifted) finish(s, Row::zero());
        return;
      }
      Step<Acc> steps[T::kVector];
      if constexpr (kPasses) {
        cuda::Vector<Acc, T::kVector> coefficients[2];
#pragma unroll
        for (int i = 0; i < 2 * kCoefficients; ++i) {
          memcpy(coefficients[i / kCoefficients].accesses + i % kCoefficients, &rows(i, s), sizeof(Row));
        }
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) steps[j] = {coefficients[0][j], coefficients[1][j]};
      } else {
        const Inputs step_inputs = inputs.next(s, rows);
        with_recurrence(variant, [&](const auto& recurrence) {
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) {
            Acc x[Inputs::kInputs];
            step_inputs.get(j, x);
            steps[j] = recurrence.step(gates_again(keeps, gates[decltype(keeps)::value ? s : 0][j], recurrence, x), x);
          }
        });
      }
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) h[j] = Math<Acc>::fma(steps[j].a, h[j], steps[j].b);
      if constexpr (T::kShifted) {
        finish(s, Row::round(h));
      } else {
        out.template store_next<Scalar>(true, Row::round(h));
      }
      if constexpr (!T::kPlain) {
        const int64_t t = at.step(s);
        if (p.ends(t)) store_state<T>(p.last_state, p.sequence(at.batch, t), at, h);
      }
    });
    if (T::kPlain && at.steps > 0 && at.step(at.steps) == p.seqlen) store_state<T>(p.last_state, at.batch, at, h);
  };

  const auto apply = [&](const ThreadTile<T>& at, const auto& rows, Acc(&h)[T::kVector]) {
    apply_steps(at, rows, h, [](int, const Row&) {});
  };
  const auto shift = [&](const ThreadTile<T>& at, int buffer) { shifted.shift(at, buffer); };
  const auto apply_shifted = [&](const ThreadTile<T>& at, HeldRows<T>& held, const SharedRows<T>& next_rows,
                                 Acc(&h)[T::kVector]) {
    apply_steps(at, held, h, [&](int s, const Row& row) {
      held.take(next_rows, s);
      next_rows(0, s) = row;
    });
  };
  const auto store = [&](const ThreadTile<T>& at, int buffer) { shifted.store(at, buffer, 0, p.h); };
  for_each_tile<T>(p, partition, shared, p.initial_state, stage, ShiftedWork{shift, apply_shifted, store}, reduce, apply);
}

template <typename Scalar>
cudaError_t launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, cudaStream_t stream) {
  return launch_variant<Scalar, true>(params, partition, [&](auto variant, auto rows) {
    using Variant = decltype(variant);
    constexpr TileRows kRows = decltype(rows)::value;
    return launch_tiles<FwdTile<Scalar, Variant, kRows>>(linear_scan_fwd_kernel<Scalar, Variant, kRows>, params, partition,
                                                         kFwdBlocks, stream);
  });
}

}  // namespace ssm_kernels::linear_scan
