// Linear scan, backward, on CUDA: the gradients of the raw inputs in one pass over memory.
//
//   e_t = a_t e_{t+1} + a_t grad_h_t          g_t = grad_h_t + e_{t+1}
//   the input's gradients from g_t, h_{t-1} and the inputs, as the recurrence has them
//
// This is a linear scan that walks from the last step to the first (position 0 is the last step), begun with the gradient of
// the last state. A thread copies its steps of the inputs, of grad_h and of h one step earlier to shared memory, a tile ahead;
// what its steps do to e, the e before them (linear_scan_carry.cuh), and the gradients then follow as in forward, a and the
// gates computed once for each of the two. Each of these tensors is read once and each gradient written once. (Inputs that
// broadcast are read where they are.)
#pragma once

#include <type_traits>

#include "linear_scan/linear_scan_device.cuh"

namespace ssm_kernels::linear_scan {

// The gradients of the inputs of one of a thread's steps.
template <typename T, typename Variant>
struct StepGradients {
  using Inputs = StepInputs<T, Variant>;
  using Acc = typename T::Acc;
  using Row = typename Shared<T>::Row;

  Row narrow[Inputs::kNarrow];
  cuda::Vector<Acc, T::kVector> wide[Inputs::kWide > 0 ? Inputs::kWide : 1];

  __device__ __forceinline__ void set(int j, const Acc (&grad)[Inputs::kInputs]) {
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) narrow[i].set(j, cuda::from_accumulate<typename T::Scalar>(grad[i]));
#pragma unroll
    for (int i = 0; i < Inputs::kWide; ++i) wide[i].set(j, grad[Inputs::kNarrow + i]);
  }

  __device__ __forceinline__ void store(int64_t step, const LinearScanBwdParams& p, const Partition& partition,
                                        const Place<T>& at) const {
    const auto rows_of = [&](int i) { return Rows<T>(p.grad_inputs[i], partition, Partition::kGradInputs + i, at); };
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) {
      if (p.grad_inputs[i].data != nullptr) rows_of(i).template store<typename T::Scalar>(step, narrow[i]);
    }
#pragma unroll
    for (int i = 0; i < Inputs::kWide; ++i) {
      const Rows<T> rows = rows_of(Inputs::kNarrow + i);
      if (rows.view.data == nullptr) continue;
      if (rows.view.is_accumulate) {
        rows.template store<Acc>(step, wide[i]);
        continue;
      }
      Row row;
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) row.set(j, cuda::from_accumulate<typename T::Scalar>(wide[i][j]));
      rows.template store<typename T::Scalar>(step, row);
    }
  }
};

template <typename Scalar, typename Variant, bool is_plain>
using BwdTile = Tile<Scalar, kBwdThreadSteps, static_cast<int>(Variant::kFirstBroadcast) + 2, is_plain>;
// Of shared memory, five tensors take so much that only two blocks have room on a multiprocessor.
template <typename Variant>
constexpr int kBwdBlocks = Variant::kFirstBroadcast <= 2 ? 3 : 2;

template <typename Scalar, typename Variant, bool is_plain>
__global__ void __launch_bounds__(kThreads, kBwdBlocks<Variant>)
    linear_scan_bwd_kernel(const __grid_constant__ LinearScanBwdParams p, const __grid_constant__ Partition partition) {
  using T = BwdTile<Scalar, Variant, is_plain>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  using Row = typename Shared<T>::Row;
  constexpr int kGradH = Inputs::kNarrow, kHBefore = kGradH + 1;  // their places in shared memory
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);

  const auto stage = [&](const Place<T>& at, int buffer) {
    const int64_t last = p.seqlen - 1 - at.position;
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) {
      if (i == Variant::kAdded) continue;
      const Rows<T> rows(p.inputs[i], partition, Partition::kInputs + i, at);
#pragma unroll
      for (int s = 0; s < T::kThreadSteps; ++s) {
        if (s < at.steps) rows.stage(last - s, &shared.row(buffer, i, s));
      }
    }
    const Rows<T> grad_h(p.grad_h, partition, Partition::kGradH, at), h(p.h, partition, Partition::kH, at);
#pragma unroll
    for (int s = 0; s < T::kThreadSteps; ++s) {
      if (p.grad_h.data == nullptr) {
        shared.row(buffer, kGradH, s) = Row::zero();
      } else if (s < at.steps) {
        grad_h.stage(last - s, &shared.row(buffer, kGradH, s));
      }
      if (last - s > 0) h.stage(last - s - 1, &shared.row(buffer, kHBefore, s));
    }
  };

  for_each_tile<T>(p, partition, shared, stage, [&](const Place<T>& at, int buffer) {
    Link<T> link(partition, at.chain, at.tile);
    const int64_t last = p.seqlen - 1 - at.position;
    Map<Acc> own[T::kVector];
    bool is_cut = false;
#pragma unroll 1
    for (int s = 0; s < at.steps; ++s) {
      const int64_t t = last - s;
      if constexpr (!T::kPlain) {
        if (p.ends(t)) {
          Acc grad_last[T::kVector];
          load_state<T>(p.grad_last_state, p.sequence(at.batch, t), at, grad_last);
#pragma unroll
          for (int j = 0; j < T::kVector; ++j) own[j] = {0, grad_last[j]};
          is_cut = true;
        }
      }
      const Inputs inputs(shared, buffer, s, t, p, partition, at);
      const Row grad_h = shared.row(buffer, kGradH, s);
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) {
        Acc x[Inputs::kInputs];
        inputs.get(j, x);
        const Acc a = Variant::step(x).a;
        own[j] = {own[j].A * a, a * (own[j].B + cuda::to_accumulate(grad_h[j]))};
      }
    }

    Acc e[T::kVector];
    carry<T>(
        link, shared.carry, buffer, [&](int channel) { return at.element(p.grad_last_state, p, channel); }, own, is_cut, e);

#pragma unroll 1
    for (int s = 0; s < at.steps; ++s) {
      const int64_t t = last - s;
      const bool begins = T::kPlain ? t == 0 : p.begins(t);
      if constexpr (!T::kPlain) {
        if (p.ends(t)) load_state<T>(p.grad_last_state, p.sequence(at.batch, t), at, e);
      }
      Acc before[T::kVector];
      if (begins) {
        load_state<T>(p.initial_state, p.sequence(at.batch, t), at, before);
      } else {
        const Row h_before = shared.row(buffer, kHBefore, s);
#pragma unroll
        for (int j = 0; j < T::kVector; ++j) before[j] = cuda::to_accumulate(h_before[j]);
      }
      const Inputs inputs(shared, buffer, s, t, p, partition, at);
      const Row grad_h = shared.row(buffer, kGradH, s);
      StepGradients<T, Variant> grads;
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) {
        Acc x[Inputs::kInputs], grad[Inputs::kInputs];
        inputs.get(j, x);
        const Acc g = cuda::to_accumulate(grad_h[j]) + e[j];
        Variant::gradients(x, before[j], g, grad);
        e[j] = Variant::step(x).a * g;
        grads.set(j, grad);
      }
      grads.store(t, p, partition, at);
      if (begins) store_state<T>(p.grad_initial_state, p.sequence(at.batch, t), at, e);
    }
  });
}

template <typename Scalar>
int launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition, cudaStream_t stream) {
  int error = cudaSuccess;
  visit_recurrence(params.recurrence, params.options, [&](auto variant) {
    using Variant = decltype(variant);
    const auto launch = [&](auto plain) {
      constexpr bool kPlain = decltype(plain)::value;
      return launch_tiles<BwdTile<Scalar, Variant, kPlain>>(linear_scan_bwd_kernel<Scalar, Variant, kPlain>, params, partition,
                                                            kBwdBlocks<Variant>, stream);
    };
    error = partition.is_plain ? launch(std::true_type()) : launch(std::false_type());
  });
  return error;
}

}  // namespace ssm_kernels::linear_scan
