// Linear scan, forward, on CUDA: h_t = a_t h_{t-1} + b_t in one pass over memory.
//
// A block works at one tile after another (linear_scan_cuda.h). A thread copies its steps of the raw inputs, kVector channels
// at once, to shared memory, asynchronously and a tile ahead. It makes a and b of them, finds what its steps do to a state,
// obtains the state before its first step (linear_scan_carry.cuh), makes a and b again or has kept them, walks through its
// steps and writes h. Each input is read once and h written once; nothing is saved for backward. (Inputs that broadcast are
// read where they are.) A thread reads only what it has copied: no barrier is needed for that.
#pragma once

#include <type_traits>

#include "linear_scan/linear_scan_device.cuh"

namespace ssm_kernels::linear_scan {

template <typename Scalar, typename Variant, bool is_plain>
using FwdTile = Tile<Scalar, fwd_thread_steps(static_cast<int>(Variant::kNames.size())),
                     static_cast<int>(Variant::kFirstBroadcast), is_plain>;
constexpr int kFwdBlocks = 3;

template <typename Scalar, typename Variant, bool is_plain>
__global__ void __launch_bounds__(kThreads, kFwdBlocks)
    linear_scan_fwd_kernel(const __grid_constant__ LinearScanFwdParams p, const __grid_constant__ Partition partition) {
  using T = FwdTile<Scalar, Variant, is_plain>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  constexpr bool kKeep = Inputs::kInputs > 2;  // a and b, in registers; that takes unrolled loops

  const auto stage = [&](const Place<T>& at, int buffer) {
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) {
      const Rows<T> rows(p.inputs[i], partition, Partition::kInputs + i, at);
#pragma unroll
      for (int s = 0; s < T::kThreadSteps; ++s) {
        if (s < at.steps) rows.stage(at.position + s, &shared.row(buffer, i, s));
      }
    }
  };

  for_each_tile<T>(p, partition, shared, stage, [&](const Place<T>& at, int buffer) {
    Link<T> link(partition, at.chain, at.tile);
    Step<Acc> steps[kKeep ? T::kThreadSteps : 1][T::kVector];
    Map<Acc> own[T::kVector];
    bool is_cut = false;
    for_each_step<kKeep, T::kThreadSteps>(at.steps, [&](int s) {
      const int64_t t = at.position + s;
      if constexpr (!T::kPlain) {
        if (p.begins(t)) {
          Acc initial[T::kVector];
          load_state<T>(p.initial_state, p.sequence(at.batch, t), at, initial);
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) own[j] = {0, initial[j]};
          is_cut = true;
        }
      }
      const Inputs inputs(shared, buffer, s, t, p, partition, at);
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) {
        Acc x[Inputs::kInputs];
        inputs.get(j, x);
        const Step<Acc> step = Variant::step(x);
        own[j] = {own[j].A * step.a, Math<Acc>::fma(step.a, own[j].B, step.b)};
        if constexpr (kKeep) steps[s][j] = step;
      }
    });

    Acc h[T::kVector];
    carry<T>(link, shared.carry, buffer, [&](int channel) { return at.element(p.initial_state, p, channel); }, own, is_cut, h);

    const Rows<T> out(p.h, partition, Partition::kH, at);
    for_each_step<kKeep, T::kThreadSteps>(at.steps, [&](int s) {
      const int64_t t = at.position + s;
      if constexpr (!T::kPlain) {
        if (p.begins(t)) load_state<T>(p.initial_state, p.sequence(at.batch, t), at, h);
      }
      if constexpr (!kKeep) {
        const Inputs inputs(shared, buffer, s, t, p, partition, at);
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) {
          Acc x[Inputs::kInputs];
          inputs.get(j, x);
          steps[0][j] = Variant::step(x);
        }
      }
      typename Shared<T>::Row row;
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) {
        const Step<Acc>& step = steps[kKeep ? s : 0][j];
        h[j] = Math<Acc>::fma(step.a, h[j], step.b);
        row.set(j, cuda::from_accumulate<Scalar>(h[j]));
      }
      out.template store<Scalar>(t, row);
      if constexpr (!T::kPlain) {
        if (p.ends(t)) store_state<T>(p.last_state, p.sequence(at.batch, t), at, h);
      }
    });
    if (T::kPlain && at.steps > 0 && at.position + at.steps == p.seqlen) store_state<T>(p.last_state, at.batch, at, h);
  });
}

template <typename Scalar>
int launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, cudaStream_t stream) {
  int error = cudaSuccess;
  visit_recurrence(params.recurrence, params.options, [&](auto variant) {
    using Variant = decltype(variant);
    const auto launch = [&](auto plain) {
      constexpr bool kPlain = decltype(plain)::value;
      return launch_tiles<FwdTile<Scalar, Variant, kPlain>>(linear_scan_fwd_kernel<Scalar, Variant, kPlain>, params, partition,
                                                            kFwdBlocks, stream);
    };
    error = partition.is_plain ? launch(std::true_type()) : launch(std::false_type());
  });
  return error;
}

}  // namespace ssm_kernels::linear_scan
