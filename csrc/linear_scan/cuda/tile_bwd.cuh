// Linear scan, backward, on CUDA: the gradients of the raw inputs in one pass over memory.
//
//   e_t = a_t e_{t+1} + a_t grad_h_t          g_t = grad_h_t + e_{t+1}
//   the input's gradients from g_t, h_{t-1} and the inputs, as the recurrence has them
//
// Tensors are (batch, seqlen, channels). This is a linear scan from the last step to the first (position 0 is the last step)
// that starts from the gradient of the last state. A thread copies its steps of the inputs, of grad_h and of h one step earlier
// to shared memory asynchronously. The map of its steps on e, the e before them (tile_carry.cuh) and the gradients follow as in
// forward, from gates that are computed twice. Each tensor is read once and each gradient written once; inputs that broadcast
// are read from global memory twice. Rows of plain tiles may start at any element, in kernels of their own, as in forward.
#pragma once

#include <type_traits>
#include <utility>

#include "linear_scan/cuda/tile.cuh"

namespace ssm_kernels::linear_scan {

// The gradients of the inputs of one of a thread's steps.
template <typename T, typename Variant>
struct StepGradients {
  using Inputs = StepInputs<T, Variant>;
  using Acc = typename T::Acc;

  typename Shared<T>::Row narrow[Inputs::kNarrow];
  cuda::Vector<Acc, T::kVector> wide[Inputs::kWide > 0 ? Inputs::kWide : 1];

  __device__ __forceinline__ void set(int j, const Acc (&grad)[Inputs::kInputs]) {
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) narrow[i].set(j, cuda::from_accumulate<typename T::Scalar>(grad[i]));
#pragma unroll
    for (int i = 0; i < Inputs::kWide; ++i) wide[i].set(j, grad[Inputs::kNarrow + i]);
  }
};

// The rows of the gradients of all of a thread's steps in a tile.
template <typename T, typename Variant>
struct ThreadGradients {
  using Inputs = StepInputs<T, Variant>;

  Rows<T> rows[Inputs::kInputs];

  __device__ __forceinline__ ThreadGradients(const LinearScanBwdParams& p, const Partition& partition,
                                             const ThreadTile<T>& at) {
#pragma unroll
    for (int i = 0; i < Inputs::kInputs; ++i) {
      const bool is_accumulate = i >= Inputs::kNarrow && p.grad_inputs[i].is_accumulate;
      rows[i] = Rows<T>(p.grad_inputs[i], partition, Partition::kGradInputs + i, at, 0,
                        is_accumulate ? sizeof(typename T::Acc) : sizeof(typename T::Scalar));
    }
  }

  // Called for each step, in order.
  __device__ __forceinline__ void store_next(bool exists, const StepGradients<T, Variant>& grads) {
#pragma unroll
    for (int i = 0; i < Inputs::kInputs; ++i) {
      if (T::kShifted && i < Inputs::kNarrow) continue;  // stored by the warp
      if (rows[i].view->data == nullptr) continue;
      if (i < Inputs::kNarrow) {
        rows[i].template store_next<typename T::Scalar>(exists, grads.narrow[i < Inputs::kNarrow ? i : 0]);
        continue;
      }
      const auto& wide = grads.wide[i < Inputs::kNarrow ? 0 : i - Inputs::kNarrow];
      if (rows[i].view->is_accumulate) {
        rows[i].template store_next<typename T::Acc>(exists, wide);
        continue;
      }
      typename Shared<T>::Row row;
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) row.set(j, cuda::from_accumulate<typename T::Scalar>(wide[j]));
      rows[i].template store_next<typename T::Scalar>(exists, row);
    }
  }
};

template <typename Scalar, typename Variant, TileRows tile_rows>
using BwdTile = Tile<Scalar, kBwdThreadSteps, kStagedInputs<Variant, false> + 2, tile_rows, false>;
// Blocks per multiprocessor: the shared memory of five tensors leaves room for two.
template <typename Variant>
constexpr int kBwdBlocks = kStagedInputs<Variant, false> <= 2 ? 3 : 2;

template <typename Scalar, typename Variant, TileRows tile_rows>
__global__ void __launch_bounds__(kThreads, kBwdBlocks<Variant>)
    linear_scan_bwd_kernel(const __grid_constant__ LinearScanBwdParams p, const __grid_constant__ Partition partition) {
  using T = BwdTile<Scalar, Variant, tile_rows>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  using Row = typename Shared<T>::Row;
  constexpr int kGradH = Inputs::kStaged, kHBefore = kGradH + 1;  // their numbers in shared memory
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  const Variant variant = variant_of<Variant>(p);
  const int staged = staged_inputs_of<Variant, false>(p);

  const auto view = [&](int i) { return backward_view<Inputs::kStaged, typename T::Scalar>(p, i); };
  const ShiftedTile<T, kHBefore + 1, decltype(view)> shifted{shared, p, view};
  const auto stage = [&](const ThreadTile<T>& at, int buffer) {
    if constexpr (T::kShifted) {
      // The first step has no h before it. An absent grad_h has no steps.
      const int with_before = at.steps - (at.steps > 0 && at.step(at.steps - 1) == 0 ? 1 : 0);
      return shifted.copy(at, buffer, [&](int i) {
        return i == kHBefore ? with_before : i == kGradH && p.grad_h.data == nullptr ? 0 : at.steps;
      });
    }
    const SharedRows<T> target{shared, buffer};
    Rows<T> rows[Inputs::kStaged];
#pragma unroll
    for (int i = 0; i < Inputs::kStaged; ++i) rows[i] = Rows<T>(p.inputs[i], partition, Partition::kInputs + i, at);
    // The first step has no h before it.
    const int steps_with_before = at.steps - (at.steps > 0 && at.step(at.steps - 1) == 0 ? 1 : 0);
    Rows<T> grad_h(p.grad_h, partition, Partition::kGradH, at), h_before(p.h, partition, Partition::kH, at, 1);
    for_each_step<T, false, T::kThreadSteps / 2>(at.steps, [&](int s, auto) {
      stage_inputs<Variant>(rows, staged, s < at.steps, target, s);
      if (p.grad_h.data == nullptr) {
        target(kGradH, s) = Row::zero();
      } else {
        grad_h.stage_next(s < at.steps, &target(kGradH, s));
      }
      h_before.stage_next(s < steps_with_before, &target(kHBefore, s));
    });
  };

  const auto reduce = [&](const ThreadTile<T>& at, const SharedRows<T>& rows, Map<Acc>(&own)[T::kVector]) {
    ThreadInputs<T, Variant> inputs(p, partition, at);
    bool is_reset = false;
    for_each_step<T, false, T::kThreadSteps / 2>(at.steps, [&](int s, auto) {
      if constexpr (!T::kPlain) {
        const int64_t t = at.step(s);
        if (p.is_cut(at.batch, t)) {
          Acc grad_last[T::kVector];
          load_state<T>(p.ends(t) ? p.grad_last_state : StateView(), p.sequence(at.batch, t), at, grad_last);
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) own[j] = {0, grad_last[j]};
          is_reset = true;
        }
      }
      const Inputs step_inputs = inputs.next(s, rows);
      const Row grad_h = rows(kGradH, s);
      with_recurrence(variant, [&](const auto& recurrence) {
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) {
          Acc x[Inputs::kInputs];
          step_inputs.get(j, x);
          const Acc a = recurrence.step(recurrence.gates(x), x).a;
          own[j] = {own[j].decay * a, a * (own[j].offset + grad_h.accumulate(j))};
        }
      });
    });
    return is_reset;
  };

  // Where rows are shifted, finish(s, gradients) gets the gradients of inputs that do not broadcast.
  const auto apply_steps = [&](const ThreadTile<T>& at, const auto& rows, Acc(&e)[T::kVector], const auto& finish) {
    ThreadInputs<T, Variant> inputs(p, partition, at);
    ThreadGradients<T, Variant> out(p, partition, at);
    for_each_step<T, false>(at.steps, [&](int s, auto) {
      const int64_t t = at.step(s);
      const bool begins = T::kPlain ? s + 1 == at.steps && t == 0 : p.begins(at.batch, t);
      if constexpr (!T::kPlain) {
        if (p.is_cut(at.batch, t)) {
          load_state<T>(p.ends(t) ? p.grad_last_state : StateView(), p.sequence(at.batch, t), at, e);
        }
      }
      Acc before[T::kVector];
      if (begins) {
        load_state<T>(p.initial_state, p.sequence(at.batch, t), at, before);
      } else {
        const Row h_before = rows(kHBefore, s);
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) before[j] = h_before.accumulate(j);
      }
      const Inputs step_inputs = inputs.next(s, rows);
      const Row grad_h = rows(kGradH, s);
      StepGradients<T, Variant> grads;
      with_recurrence(variant, [&](const auto& recurrence) {
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) {
          Acc x[Inputs::kInputs], grad[Inputs::kInputs] = {};
          step_inputs.get(j, x);
          const auto gates = recurrence.gates(x);
          const Acc g = grad_h.accumulate(j) + e[j];
          recurrence.gradients(gates, x, before[j], g, grad);
          e[j] = recurrence.step(gates, x).a * g;
          grads.set(j, grad);
        }
      });
      out.store_next(s < at.steps, grads);
      if constexpr (T::kShifted) finish(s, grads);
      if (begins) {
        // With resets several tiles have parts of one gradient: entry.cpp adds the rows up.
        const bool has_row = !T::kPlain && p.reset.data != nullptr;
        store_state<T>(p.grad_initial_state, has_row ? at.batch * p.seqlen + t : p.sequence(at.batch, t), at, e);
      }
    });
  };

  using Gradients = StepGradients<T, Variant>;
  const auto apply = [&](const ThreadTile<T>& at, const auto& rows, Acc(&e)[T::kVector]) {
    apply_steps(at, rows, e, [](int, const Gradients&) {});
  };
  const auto shift = [&](const ThreadTile<T>& at, int buffer) { shifted.shift(at, buffer); };
  const auto apply_shifted = [&](const ThreadTile<T>& at, HeldRows<T>& held, const SharedRows<T>& next_rows,
                                 Acc(&e)[T::kVector]) {
    apply_steps(at, held, e, [&](int s, const Gradients& grads) {
      held.take(next_rows, s);
#pragma unroll
      for (int i = 0; i < Inputs::kNarrow; ++i) next_rows(i, s) = grads.narrow[i];
    });
  };
  const auto store = [&](const ThreadTile<T>& at, int buffer) {
#pragma unroll 1
    for (int i = 0; i < Inputs::kNarrow; ++i) {
      if (p.grad_inputs[i].data != nullptr) shifted.store(at, buffer, i, p.grad_inputs[i]);
    }
  };
  for_each_tile<T>(p, partition, shared, p.grad_last_state, stage, ShiftedWork{shift, apply_shifted, store}, reduce, apply);
}

template <typename Scalar>
cudaError_t launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition, cudaStream_t stream) {
  return launch_variant<Scalar, false>(params, partition, [&](auto variant, auto rows) {
    using Variant = decltype(variant);
    constexpr TileRows kRows = decltype(rows)::value;
    return launch_tiles<BwdTile<Scalar, Variant, kRows>>(linear_scan_bwd_kernel<Scalar, Variant, kRows>, params, partition,
                                                         kBwdBlocks<Variant>, stream);
  });
}

}  // namespace ssm_kernels::linear_scan
