// Linear scan, backward, on CUDA: the gradients of the raw inputs in one pass over memory.
//
//   e_t = a_t e_{t+1} + a_t grad_h_t          g_t = grad_h_t + e_{t+1}
//   the input's gradients from g_t, h_{t-1} and the inputs, as the recurrence has them
//
// This is a linear scan that walks from the last step to the first (position 0 is the last step), begun with the gradient of
// the last state. A thread copies its steps of the inputs, of grad_h and of h one step earlier to shared memory; what its steps
// do to e, the e before them (linear_scan_carry.cuh), and the gradients then follow as in forward. Each of these tensors is
// read once and each gradient written once.
#pragma once

#include "linear_scan/linear_scan_device.cuh"

namespace ssm_kernels::linear_scan {

// The gradients of the inputs of one of a thread's steps.
template <typename T, typename Variant>
struct StepGradients {
  using Inputs = StepInputs<T, Variant>;
  using Acc = typename T::Acc;
  using Row = typename Stage<T>::Row;

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

template <typename Scalar, typename Variant>
using BwdTile = Tile<Scalar, bwd_tensors(static_cast<int>(Variant::kFirstBroadcast))>;

template <typename Scalar, typename Variant>
__global__ void __launch_bounds__(kTileThreads, resident_blocks(BwdTile<Scalar, Variant>::kTensors))
    linear_scan_bwd_kernel(const __grid_constant__ LinearScanBwdParams p, const __grid_constant__ Partition partition) {
  using T = BwdTile<Scalar, Variant>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  using Row = typename Stage<T>::Row;
  constexpr int kGradH = Inputs::kNarrow, kHBefore = kGradH + 1;  // their places on the stage
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ CarryShared<Acc> shared;
  const Stage<T> stage{reinterpret_cast<Row*>(memory)};
  const Place<T> at(p, partition);
  const auto step_at = [&](int s) { return p.seqlen - 1 - (at.position + s); };

#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
    const int64_t t = step_at(s);
    if (t < 0) break;
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) {
      Rows<T>(p.inputs[i], partition, Partition::kInputs + i, at).stage(t, stage.place(i, s));
    }
    if (p.grad_h.data != nullptr) {
      Rows<T>(p.grad_h, partition, Partition::kGradH, at).stage(t, stage.place(kGradH, s));
    } else {
      *stage.place(kGradH, s) = Row::zero();
    }
    if (t > 0) Rows<T>(p.h, partition, Partition::kH, at).stage(t - 1, stage.place(kHBefore, s));
  }
  cuda::wait_for_async_copies();

  Map<Acc> own[T::kVector];
  bool is_cut = false;
#pragma unroll 1
  for (int s = 0; s < T::kSteps; ++s) {
    const int64_t t = step_at(s);
    if (t < 0) break;
    if (p.ends(t)) {
      Acc last[T::kVector];
      load_state<T>(p.grad_last_state, p.sequence(at.batch, t), at, last);
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) own[j] = {0, last[j]};
      is_cut = true;
    }
    const Inputs inputs(stage, s, t, p, partition, at);
    const Row grad_h = *stage.place(kGradH, s);
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      Acc x[Inputs::kInputs];
      inputs.get(j, x);
      const Acc a = Variant::step(x).a;
      own[j] = {own[j].A * a, a * (own[j].B + cuda::to_accumulate(grad_h[j]))};
    }
  }

  Acc e[T::kVector];
  carry<T>(partition, at.chain, at.tile, shared, own, is_cut, e);

#pragma unroll 1
  for (int s = 0; s < T::kSteps; ++s) {
    const int64_t t = step_at(s);
    if (t < 0) break;
    const bool begins = p.begins(t);
    if (p.ends(t)) load_state<T>(p.grad_last_state, p.sequence(at.batch, t), at, e);
    Acc before[T::kVector];
    if (begins) {
      load_state<T>(p.initial_state, p.sequence(at.batch, t), at, before);
    } else {
      const Row h_before = *stage.place(kHBefore, s);
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) before[j] = cuda::to_accumulate(h_before[j]);
    }
    const Inputs inputs(stage, s, t, p, partition, at);
    const Row grad_h = *stage.place(kGradH, s);
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
}

template <typename Scalar>
int launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned int>(partition.chains * partition.tiles);
  int error = cudaSuccess;
  visit_recurrence(params.recurrence, params.options, [&](auto variant) {
    const auto kernel = linear_scan_bwd_kernel<Scalar, decltype(variant)>;
    constexpr size_t kBytes = Stage<BwdTile<Scalar, decltype(variant)>>::kBytes;
    error = cuda::allow_shared_bytes(kernel, kBytes);
    if (error == cudaSuccess) kernel<<<blocks, kTileThreads, kBytes, stream>>>(params, partition);
  });
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace ssm_kernels::linear_scan
