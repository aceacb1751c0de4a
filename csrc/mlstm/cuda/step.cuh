// The decoding step of xLSTM's matrix memory on CUDA, in two kernels.
//
// 1. mlstm_step_gates_kernel: a warp has a row of the call and a head. It updates n and m, and writes the decay, the gain and
//    the factor of the output, which all rows of C need: blocks that update C then read no state that another block writes.
// 2. mlstm_step_kernel: a warp has kRowsOfWarp rows of a head's C, and a lane some columns of each. The warp reads and writes
//    each element of C once, in accesses of 16 bytes where rows are whole vectors, and sums the products with q over its lanes.
#pragma once

#include <cuda_runtime.h>

#include "common/mlstm_gates.h"
#include "cuda/lane_sums.cuh"
#include "mlstm/cuda/step_launch.h"
#include "mlstm/cuda/warps.cuh"

namespace ssm_kernels::mlstm::step {

using cuda::from_accumulate, cuda::kWarpSize, cuda::sum_over_warp, cuda::to_accumulate;

template <typename Input>
__global__ void __launch_bounds__(kStepThreads)
    mlstm_step_gates_kernel(const __grid_constant__ StepParams p, void* numbers, int64_t first) {
  using Acc = cuda::AccumulateType<Input>;
  const int64_t index = warp_number<kStepWarps>(first);
  if (index >= p.rows * p.heads) return;
  const int64_t row = index / p.heads, head = index - row * p.heads, slot = p.slot(row);
  if (slot < 0 || slot >= p.slots) return;
  const int lane = threadIdx.x % kWarpSize;
  Acc* const m = static_cast<Acc*>(p.m.data) + p.m.offset(slot, head);
  const Acc before = *m, i = load_gate<Input>(p.i, p.i.offset(row, head));
  const Acc log_forget = log_sigmoid(load_gate<Input>(p.f, p.f.offset(row, head)));
  const Acc unit = unit_after(before, i, log_forget, p.is_exp);
  const Acc decay = Math<Acc>::exp(log_decay_between(before, unit, log_forget)), gain = input_gain(i, unit, p.is_exp);
  Acc factor = static_cast<Acc>(p.scale);
  if (p.normalize) {
    const Input* const k = static_cast<const Input*>(p.k.data) + p.k.offset(row, head);
    const Input* const q = static_cast<const Input*>(p.q.data) + p.q.offset(row, head);
    Acc* const n = static_cast<Acc*>(p.n.data) + p.n.offset(slot, head);
    Acc product = 0;
#pragma unroll 4
    for (int c = lane; c < p.key_dim; c += kWarpSize) {
      // An empty memory may hold anything.
      const Acc old = decay == Acc(0) ? Acc(0) : decay * n[c * p.n.stride_column];
      const Acc value = Math<Acc>::fma(gain, to_accumulate(k[c * p.k.stride_column]), old);
      n[c * p.n.stride_column] = value;
      product = Math<Acc>::fma(value, to_accumulate(q[c * p.q.stride_column]), product);
    }
    const Acc size = Math<Acc>::abs(factor * sum_over_warp(product)), floor = Math<Acc>::exp(-unit);
    factor /= (size > floor || size != size ? size : floor) + static_cast<Acc>(p.eps);
  }
  __syncwarp();  // every lane has read m
  if (lane != 0) return;
  *m = unit;
  Acc* const results = static_cast<Acc*>(numbers) + index * kNumbers;
  results[kDecay] = decay;
  results[kGain] = gain;
  results[kFactor] = factor;
}

template <typename Input, typename State, bool has_vectors>
__global__ void __launch_bounds__(kStepThreads)
    mlstm_step_kernel(const __grid_constant__ StepParams p, const void* numbers, int64_t tiles_of_head, int64_t first) {
  using Acc = cuda::AccumulateType<Input>;
  constexpr int kSize = has_vectors ? cuda::kVectorBytes / static_cast<int>(sizeof(State)) : 1;
  using States = cuda::Vector<State, kSize>;
  const int64_t tile = warp_number<kStepWarps>(first);
  const int64_t index = tile / tiles_of_head;
  if (index >= p.rows * p.heads) return;
  const int64_t row = index / p.heads, head = index - row * p.heads, slot = p.slot(row);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t begin = (tile - index * tiles_of_head) * kRowsOfWarp;
  const int left = static_cast<int>(min(p.value_dim - begin, int64_t(kRowsOfWarp)));
  Input* const out = static_cast<Input*>(p.out.data) + p.out.offset(row, head) + begin * p.out.stride_column;
  if (slot < 0 || slot >= p.slots) {  // padding; a slot past the last one
    if (lane < left)
      out[lane * p.out.stride_column] = from_accumulate<Input>(slot < 0 ? Acc(0) : Acc(__int_as_float(0x7fffffff)));
    return;
  }
  const Acc* const of_head = static_cast<const Acc*>(numbers) + index * kNumbers;
  const Acc decay = of_head[kDecay], gain = of_head[kGain], factor = of_head[kFactor];
  const Input* const k = static_cast<const Input*>(p.k.data) + p.k.offset(row, head);
  const Input* const q = static_cast<const Input*>(p.q.data) + p.q.offset(row, head);
  const Input* const v = static_cast<const Input*>(p.v.data) + p.v.offset(row, head) + begin * p.v.stride_column;
  State* const head_states = static_cast<State*>(p.C.data) + p.C.offset(slot, head) + begin * p.C.stride_row;
#pragma unroll 1
  for (int batch = 0; batch < left; batch += kRowsAtOnce) {
    Acc added[kRowsAtOnce], sums[kRowsAtOnce] = {};
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      added[r] = batch + r < left ? gain * to_accumulate(v[(batch + r) * p.v.stride_column]) : Acc(0);
    }
#pragma unroll 2
    for (int c = lane * kSize; c < p.key_dim; c += kWarpSize * kSize) {
      States states[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        states[r] = States::zero();
        if (batch + r < left) states[r] = States::load_once(head_states + (batch + r) * p.C.stride_row + c * p.C.stride_column);
      }
      Acc key[kSize], query[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        key[j] = to_accumulate(k[(c + j) * p.k.stride_column]);
        query[j] = to_accumulate(q[(c + j) * p.q.stride_column]);
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        Acc values[kSize];
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const Acc old = decay == Acc(0) ? Acc(0) : decay * states[r].accumulate(j);
          values[j] = Math<Acc>::fma(added[r], key[j], old);
          sums[r] = Math<Acc>::fma(values[j], query[j], sums[r]);
        }
        if (batch + r < left) {
          States::round(values).store_once(head_states + (batch + r) * p.C.stride_row + c * p.C.stride_column);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const Acc sum = sum_over_warp(sums[r]);
      if (lane == r && batch + r < left) out[(batch + r) * p.out.stride_column] = from_accumulate<Input>(sum * factor);
    }
  }
}

template <typename Input, typename State>
cudaError_t launch_mlstm_step(const StepParams& params, void* numbers, bool has_vectors, cudaStream_t stream) {
  const int64_t heads = params.rows * params.heads, tiles = (params.value_dim + kRowsOfWarp - 1) / kRowsOfWarp;
  const cudaError_t error = launch_warps<kStepWarps>(mlstm_step_gates_kernel<Input>, heads, stream, params, numbers);
  if (error != cudaSuccess) return error;
  auto* const kernel = has_vectors ? mlstm_step_kernel<Input, State, true> : mlstm_step_kernel<Input, State, false>;
  const void* const read = numbers;
  return launch_warps<kStepWarps>(kernel, heads * tiles, stream, params, read, tiles);
}

}  // namespace ssm_kernels::mlstm::step
