// Linear scan, forward, on CUDA: h_t = a_t h_{t-1} + b_t in one pass over memory.
//
// A thread copies its steps of the raw inputs, kVector channels at once, to shared memory, asynchronously. It makes a and b of
// them to find what its steps do to a state, obtains the state before its first step (linear_scan_carry.cuh), and makes a and b
// once more to walk through its steps and write h. Each input is read once and h written once; nothing is saved for backward.
// (Inputs that broadcast are read where they are, twice.) A thread reads only what it has copied: no barrier is needed for
// that.
#pragma once

#include "linear_scan/linear_scan_device.cuh"

namespace ssm_kernels::linear_scan {

template <typename Scalar, typename Variant>
using FwdTile = Tile<Scalar, fwd_tensors(static_cast<int>(Variant::kFirstBroadcast))>;

template <typename Scalar, typename Variant>
__global__ void __launch_bounds__(kTileThreads, resident_blocks(FwdTile<Scalar, Variant>::kTensors))
    linear_scan_fwd_kernel(const __grid_constant__ LinearScanFwdParams p, const __grid_constant__ Partition partition) {
  using T = FwdTile<Scalar, Variant>;
  using Acc = typename T::Acc;
  using Inputs = StepInputs<T, Variant>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ CarryShared<Acc> shared;
  const Stage<T> stage{reinterpret_cast<typename Stage<T>::Row*>(memory)};
  const Place<T> at(p, partition);

#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
    if (at.position + s >= p.seqlen) break;
#pragma unroll
    for (int i = 0; i < Inputs::kNarrow; ++i) {
      Rows<T>(p.inputs[i], partition, Partition::kInputs + i, at).stage(at.position + s, stage.place(i, s));
    }
  }
  cuda::wait_for_async_copies();

  Map<Acc> own[T::kVector];
  bool is_cut = false;
#pragma unroll 1
  for (int s = 0; s < T::kSteps; ++s) {
    const int64_t t = at.position + s;
    if (t >= p.seqlen) break;
    if (p.begins(t)) {
      Acc initial[T::kVector];
      load_state<T>(p.initial_state, p.sequence(at.batch, t), at, initial);
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) own[j] = {0, initial[j]};
      is_cut = true;
    }
    const Inputs inputs(stage, s, t, p, partition, at);
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      Acc x[Inputs::kInputs];
      inputs.get(j, x);
      const Step<Acc> step = Variant::step(x);
      own[j] = {own[j].A * step.a, Math<Acc>::fma(step.a, own[j].B, step.b)};
    }
  }

  Acc h[T::kVector];
  carry<T>(partition, at.chain, at.tile, shared, own, is_cut, h);

  const Rows<T> out(p.h, partition, Partition::kH, at);
#pragma unroll 1
  for (int s = 0; s < T::kSteps; ++s) {
    const int64_t t = at.position + s;
    if (t >= p.seqlen) break;
    if (p.begins(t)) load_state<T>(p.initial_state, p.sequence(at.batch, t), at, h);
    const Inputs inputs(stage, s, t, p, partition, at);
    typename Stage<T>::Row row;
#pragma unroll
    for (int j = 0; j < T::kVector; ++j) {
      Acc x[Inputs::kInputs];
      inputs.get(j, x);
      const Step<Acc> step = Variant::step(x);
      h[j] = Math<Acc>::fma(step.a, h[j], step.b);
      row.set(j, cuda::from_accumulate<Scalar>(h[j]));
    }
    out.template store<Scalar>(t, row);
    if (p.ends(t)) store_state<T>(p.last_state, p.sequence(at.batch, t), at, h);
  }
}

template <typename Scalar>
int launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned int>(partition.chains * partition.tiles);
  int error = cudaSuccess;
  visit_recurrence(params.recurrence, params.options, [&](auto variant) {
    const auto kernel = linear_scan_fwd_kernel<Scalar, decltype(variant)>;
    constexpr size_t kBytes = Stage<FwdTile<Scalar, decltype(variant)>>::kBytes;
    error = cuda::allow_shared_bytes(kernel, kBytes);
    if (error == cudaSuccess) kernel<<<blocks, kTileThreads, kBytes, stream>>>(params, partition);
  });
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace ssm_kernels::linear_scan
