// The gates of mlstm_scan on CUDA: log decays and gains of all steps from the pre-activations, and m, their running unit.
//
// m_t = max(log sigmoid(f_t) + m_{t-1}, i_t) is a scan of maps m -> max(a + m, b), which compose to maps of the same form. A
// block takes a sequence and head, kTileSteps steps at a time; a thread has kThreadSteps consecutive ones. The threads' maps
// are composed over the warp and then over the block. The unit before a thread's first step, which follows from this
// composition, also replaces the one after the last step of the thread before: the units of two neighboring steps are then the
// same number in both. The memory then does not depend on the rounding of m, which only sets its unit.
#pragma once

#include <cuda_runtime.h>

#include "common/mlstm_gates.h"
#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "mlstm/cuda/launch.h"

namespace ssm_kernels::mlstm {

constexpr int kGateThreads = 256, kThreadSteps = 8, kTileSteps = kGateThreads * kThreadSteps;
constexpr int kGateWarps = kGateThreads / cuda::kWarpSize;

// m -> max(a + m, b).
template <typename Acc>
struct UnitMap {
  Acc a, b;

  __device__ __forceinline__ UnitMap after(const UnitMap& first) const { return {first.a + a, Math<Acc>::max(first.b + a, b)}; }
  __device__ __forceinline__ Acc operator()(Acc m) const { return Math<Acc>::max(a + m, b); }
};

template <typename Scalar, typename Acc>
__device__ __forceinline__ Acc load_gate(const GateView& view, int64_t offset) {
  if (view.is_input_kind) return cuda::to_accumulate(static_cast<const Scalar*>(view.data)[offset]);
  return static_cast<const Acc*>(view.data)[offset];
}

template <typename Scalar>
__global__ void __launch_bounds__(kGateThreads) mlstm_gates_kernel(const __grid_constant__ GateParams p) {
  using Acc = cuda::AccumulateType<Scalar>;
  constexpr Acc kNone = -static_cast<Acc>(INFINITY);
  __shared__ UnitMap<Acc> of_warps[kGateWarps];
  __shared__ Acc units[kGateThreads + 1];  // before each thread's steps, and after the tile
  const int64_t sequence = blockIdx.x / p.heads, head = blockIdx.x - sequence * p.heads;
  const int64_t row = p.cu_seqlens == nullptr ? sequence : 0;
  int64_t begin = 0, end = p.seqlen;
  if (p.cu_seqlens != nullptr) {  // for any values, inside the steps
    begin = min(max(p.cu_seqlens[sequence], int64_t(0)), p.seqlen);
    end = min(max(p.cu_seqlens[sequence + 1], begin), p.seqlen);
  }
  const int lane = threadIdx.x % cuda::kWarpSize, warp = threadIdx.x / cuda::kWarpSize;
  Acc carried = p.initial_m == nullptr ? kNone : static_cast<const Acc*>(p.initial_m)[blockIdx.x];
  Acc* const final_m = static_cast<Acc*>(p.final_m) + blockIdx.x;
  if (begin == end && threadIdx.x == 0) *final_m = carried;

  for (int64_t tile = begin; tile < end; tile += kTileSteps) {
    const int64_t first = tile + static_cast<int64_t>(threadIdx.x) * kThreadSteps;
    Acc i[kThreadSteps], forget[kThreadSteps];
#pragma unroll
    for (int j = 0; j < kThreadSteps; ++j) {
      const bool is_inside = first + j < end;
      const auto offset = [&](const GateView& view) {
        return row * view.stride_batch + (first + j) * view.stride_step + head * view.stride_head;
      };
      i[j] = is_inside ? load_gate<Scalar, Acc>(p.i, offset(p.i)) : kNone;
      forget[j] = is_inside ? load_gate<Scalar, Acc>(p.f, offset(p.f)) : Acc(0);
    }
    UnitMap<Acc> map{0, kNone};
#pragma unroll
    for (int j = 0; j < kThreadSteps; ++j) {
      if (first + j < end) {
        forget[j] = log_sigmoid(forget[j]);
        map = UnitMap<Acc>{forget[j], i[j]}.after(map);
      }
    }
#pragma unroll
    for (int distance = 1; distance < cuda::kWarpSize; distance *= 2) {
      const UnitMap<Acc> before{__shfl_up_sync(cuda::kAllLanes, map.a, distance),
                                __shfl_up_sync(cuda::kAllLanes, map.b, distance)};
      if (lane >= distance) map = map.after(before);
    }
    if (lane == cuda::kWarpSize - 1) of_warps[warp] = map;
    if (threadIdx.x == 0) units[0] = carried;
    __syncthreads();
    Acc before_warp = carried;
    for (int w = 0; w < warp; ++w) before_warp = of_warps[w](before_warp);
    units[threadIdx.x + 1] = p.is_exp ? map(before_warp) : Acc(0);
    __syncthreads();

    Acc unit = units[threadIdx.x];
#pragma unroll
    for (int j = 0; j < kThreadSteps; ++j) {
      if (first + j >= end) break;
      const bool is_last = j == kThreadSteps - 1;
      const Acc next = is_last ? units[threadIdx.x + 1] : unit_after(unit, i[j], forget[j], p.is_exp);
      const int64_t place = (row * p.seqlen + first + j) * p.heads + head;
      static_cast<Acc*>(p.m)[place] = next;
      static_cast<Acc*>(p.log_decay)[place] = log_decay_between(unit, next, forget[j]);
      static_cast<Acc*>(p.gain)[place] = input_gain(i[j], next, p.is_exp);
      unit = next;
      if (first + j == end - 1) *final_m = next;
    }
    carried = units[kGateThreads];
    __syncthreads();  // the next tile overwrites the units
  }
}

template <typename Scalar>
cudaError_t launch_mlstm_gates(const GateParams& params, cudaStream_t stream) {
  const int64_t blocks = params.sequences * params.heads;
  if (blocks == 0) return cudaSuccess;
  return cuda::launch(mlstm_gates_kernel<Scalar>, blocks, kGateThreads, 0, stream, false, params);
}

}  // namespace ssm_kernels::mlstm
