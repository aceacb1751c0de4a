// Linear scan, forward, on CUDA: h_t = a_t h_{t-1} + b_t in one pass over memory. Tensors are (batch, seqlen, channels).
//
// launch.h describes tiles, chains and blocks. A block computes one tile after another; nothing is saved for backward. A thread
// copies its steps of the raw inputs to shared memory asynchronously, a tile ahead, kVector channels at a time. It computes the
// gates, a and b, and from them the affine map of its steps; gets the state before its first step (carry.cuh); computes a and b
// again, from gates that it kept or recomputes; and advances the state through its steps and writes h. Each input is read once
// and h written once; inputs that broadcast are read from global memory twice. A thread reads only what it copied itself, so
// the copies need no barrier.
#pragma once

#include <type_traits>
#include <utility>

#include "linear_scan/cuda/device.cuh"

namespace ssm_kernels::linear_scan {

template <typename Scalar, typename Variant, bool is_plain>
using FwdTile = Tile<Scalar, fwd_thread_steps(static_cast<int>(Variant::kNames.size())),
                     static_cast<int>(Variant::kFirstBroadcast), is_plain, true>;
constexpr int kFwdBlocks = 3;

template <typename Scalar, typename Variant, bool is_plain>
__global__ void __launch_bounds__(kThreads, kFwdBlocks)
    linear_scan_fwd_kernel(const __grid_constant__ LinearScanFwdParams p, const __grid_constant__ Partition partition) {
  using T = FwdTile<Scalar, Variant, is_plain>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  using Gates = decltype(std::declval<Variant>().gates(std::declval<const Acc*>()));
  // Tiles that are not plain have long steps and gain little from unrolling, except that gates of three and four inputs are
  // worth keeping. Doubles lack the registers.
  constexpr bool kUnrolled = T::kPlain || (Inputs::kInputs > 2 && kHasPlainKernels<Scalar>);
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  const Variant variant = make_variant<Variant>(p.options);

  const auto stage = [&](const ThreadTile<T>& at, int buffer) {
    Rows<T> rows[Inputs::kNarrow];
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) rows[i] = Rows<T>(p.inputs[i], partition, Partition::kInputs + i, at);
    for_each_step<T, T::kPlain>(at.steps, [&](int s, auto) {
#pragma unroll
      for (int i = 0; i < Inputs::kNarrow; ++i) rows[i].stage(s, &shared.row(buffer, i, s));
    });
  };

  for_each_tile<T>(p, partition, shared, stage, [&](const ThreadTile<T>& at, int buffer) {
    LookBack<T> look_back(partition, at.index, at.tile);
    const ThreadInputs<T, Variant> inputs(shared, buffer, p, partition, at);
    Gates gates[T::kThreadSteps][T::kVector];
    Map<Acc> own[T::kVector];
    bool is_reset = false;
    for_each_step<T, kUnrolled>(at.steps, [&](int s, auto keeps) {
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
      const Inputs step_inputs = inputs[s];
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) {
        Acc x[Inputs::kInputs];
        step_inputs.get(j, x);
        const Gates made = variant.gates(x);
        const Step<Acc> step = variant.step(made, x);
        own[j] = {own[j].decay * step.a, Math<Acc>::fma(step.a, own[j].offset, step.b)};
        if constexpr (decltype(keeps)::value) gates[s][j] = made;
      }
    });

    Acc h[T::kVector];
    carry<T>(look_back, shared.carry, [&](int channel) { return at.element(p.initial_state, p, channel); }, own, is_reset, h);

    const Rows<T> out(p.h, partition, Partition::kH, at);
    for_each_step<T, kUnrolled>(at.steps, [&](int s, auto keeps) {
      if constexpr (!T::kPlain) {
        const int64_t t = at.step(s);
        if (p.begins(at.batch, t)) load_state<T>(p.initial_state, p.sequence(at.batch, t), at, h);
      }
      const Inputs step_inputs = inputs[s];
      typename Shared<T>::Row row;
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) {
        Acc x[Inputs::kInputs];
        step_inputs.get(j, x);
        const Gates made = gates_again(keeps, gates[s][j], variant, x);
        const Step<Acc> step = variant.step(made, x);
        h[j] = Math<Acc>::fma(step.a, h[j], step.b);
        row.set(j, cuda::from_accumulate<Scalar>(h[j]));
      }
      out.template store<Scalar>(s, row);
      if constexpr (!T::kPlain) {
        const int64_t t = at.step(s);
        if (p.ends(t)) store_state<T>(p.last_state, p.sequence(at.batch, t), at, h);
      }
    });
    if (T::kPlain && at.steps > 0 && at.step(at.steps) == p.seqlen) store_state<T>(p.last_state, at.batch, at, h);
  });
}

template <typename Scalar>
cudaError_t launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, cudaStream_t stream) {
  return launch_variant<Scalar>(params, partition, [&](auto variant, auto plain) {
    using Variant = decltype(variant);
    constexpr bool kPlain = decltype(plain)::value;
    return launch_tiles<FwdTile<Scalar, Variant, kPlain>>(linear_scan_fwd_kernel<Scalar, Variant, kPlain>, params, partition,
                                                          kFwdBlocks, stream);
  });
}

}  // namespace ssm_kernels::linear_scan
