// The gates of mlstm_scan on CUDA: log decays and gains of all steps from the pre-activations, and m, their running unit.
//
// m_t = max(log sigmoid(f_t) + m_{t-1}, i_t) is a scan of maps m -> max(a + m, b), which compose to maps of the same form. A
// step that begins a sequence is a constant map. A block has kGateTileSteps steps of a row and head; a thread has kThreadSteps
// consecutive ones. The threads' maps are composed over the warp and then over the block. Where rows have several tiles, an
// earlier kernel writes the map of each tile, and a block applies those of the tiles before its own.
//
// The unit before a thread's first step, which follows from this composition, also replaces the one after the last step of the
// thread before, in the tile before too: the units of two neighboring steps are then the same number in both. The memory then
// does not depend on the rounding of m, which only sets its unit.
#pragma once

#include <cuda_runtime.h>

#include "common/mlstm_gates.h"
#include "mlstm/cuda/launch.h"
#include "mlstm/cuda/sequences.cuh"
#include "mlstm/cuda/warps.cuh"

namespace ssm_kernels::mlstm {

constexpr int kGateThreads = 256, kThreadSteps = kGateTileSteps / kGateThreads;
constexpr int kGateWarps = kGateThreads / cuda::kWarpSize;

// m -> max(a + m, b).
template <typename Acc>
struct UnitMap {
  static constexpr Acc kNone = -static_cast<Acc>(INFINITY);

  Acc a = 0, b = kNone;

  __device__ __forceinline__ UnitMap after(const UnitMap& first) const { return {first.a + a, Math<Acc>::max(first.b + a, b)}; }
  __device__ __forceinline__ Acc operator()(Acc m) const { return Math<Acc>::max(a + m, b); }
  __device__ __forceinline__ UnitMap of_lane(int lane) const {
    return {__shfl_sync(cuda::kAllLanes, a, lane), __shfl_sync(cuda::kAllLanes, b, lane)};
  }
  // The composition of this map after those of the lanes before, from the first on.
  __device__ __forceinline__ UnitMap after_earlier_lanes() const {
    UnitMap result = *this;
#pragma unroll
    for (int distance = 1; distance < cuda::kWarpSize; distance *= 2) {
      const UnitMap before{__shfl_up_sync(cuda::kAllLanes, result.a, distance),
                           __shfl_up_sync(cuda::kAllLanes, result.b, distance)};
      if (static_cast<int>(threadIdx.x) % cuda::kWarpSize >= distance) result = result.after(before);
    }
    return result;
  }
};

// The composition of `count` maps by one warp. It depends on the maps and their number alone.
template <typename Acc>
__device__ __forceinline__ UnitMap<Acc> compose(const UnitMap<Acc>* maps, int64_t count) {
  const int lane = threadIdx.x % cuda::kWarpSize;
  const int64_t of_lane = (count + cuda::kWarpSize - 1) / cuda::kWarpSize, first = lane * of_lane;
  UnitMap<Acc> result;
  for (int64_t i = first; i < min(first + of_lane, count); ++i) result = maps[i].after(result);
  return result.after_earlier_lanes().of_lane(cuda::kWarpSize - 1);
}

// A thread's steps of a row and head.
template <typename Scalar>
class GateSteps {
 public:
  using Acc = cuda::AccumulateType<Scalar>;
  static constexpr Acc kNone = UnitMap<Acc>::kNone;

  Acc i[kThreadSteps], log_forget[kThreadSteps];

  __device__ __forceinline__ GateSteps(const GateParams& p, int64_t row, int64_t head, int64_t first)
      : p_(p), row_(row), head_(head), first_(first), sequence_(p, row, min(first, p.seqlen - 1)) {
#pragma unroll
    for (int j = 0; j < kThreadSteps; ++j) {
      const auto offset = [&](const GateView& view) {
        return row * view.stride_batch + (first + j) * view.stride_step + head * view.stride_head;
      };
      i[j] = is_there(j) ? load_gate<Scalar>(p.i, offset(p.i)) : kNone;
      log_forget[j] = is_there(j) ? log_sigmoid(load_gate<Scalar>(p.f, offset(p.f))) : Acc(0);
    }
  }

  __device__ __forceinline__ bool is_there(int j) const { return first_ + j < p_.seqlen; }
  __device__ __forceinline__ int64_t step(int j) const { return first_ + j; }

  // Whether the memory before a step is that of its sequence's beginning, or empty. Then initial_unit() is its unit.
  __device__ __forceinline__ bool begins(int j) {
    sequence_.move_to(step(j));
    return sequence_.begins_at(step(j)) || (p_.resets != nullptr && p_.resets[row_ * p_.seqlen + step(j)] != 0);
  }
  __device__ __forceinline__ Acc initial_unit(int j) const {
    if (p_.initial_m == nullptr || !sequence_.begins_at(step(j))) return kNone;
    return static_cast<const Acc*>(p_.initial_m)[place_of_sequence()];
  }
  __device__ __forceinline__ void keep_if_last(int j, Acc unit) const {
    if (sequence_.ends_at(step(j))) static_cast<Acc*>(p_.final_m)[place_of_sequence()] = unit;
  }

  __device__ __forceinline__ UnitMap<Acc> map() {
    UnitMap<Acc> result;
#pragma unroll
    for (int j = 0; j < kThreadSteps; ++j) {
      if (!is_there(j)) break;
      if (begins(j)) result = {kNone, initial_unit(j)};
      result = UnitMap<Acc>{log_forget[j], i[j]}.after(result);
    }
    return result;
  }

 private:
  __device__ __forceinline__ int64_t place_of_sequence() const { return sequence_.number() * p_.heads + head_; }

  const GateParams& p_;
  int64_t row_, head_, first_;
  SequenceCursor sequence_;
};

// The row, head and tile of a block.
struct GateBlock {
  int64_t row, head, tile, tiles;

  __device__ __forceinline__ explicit GateBlock(const GateParams& p) : tiles(gate_tiles(p.seqlen)) {
    const int64_t of_tiles = blockIdx.x / tiles;
    tile = blockIdx.x - of_tiles * tiles;
    row = of_tiles / p.heads;
    head = of_tiles - row * p.heads;
  }
  __device__ __forceinline__ int64_t first_step() const {
    return tile * kGateTileSteps + static_cast<int64_t>(threadIdx.x) * kThreadSteps;
  }
  template <typename Acc>
  __device__ __forceinline__ UnitMap<Acc>* maps_of_row(const GateParams& p) const {
    return static_cast<UnitMap<Acc>*>(p.maps) + (row * p.heads + head) * tiles;
  }
};

// Writes the map of each tile.
template <typename Scalar>
__global__ void __launch_bounds__(kGateThreads) mlstm_gate_maps_kernel(const __grid_constant__ GateParams p) {
  using Acc = cuda::AccumulateType<Scalar>;
  __shared__ UnitMap<Acc> of_warps[kGateWarps];
  const GateBlock block(p);
  GateSteps<Scalar> steps(p, block.row, block.head, block.first_step());
  const UnitMap<Acc> map = steps.map().after_earlier_lanes();
  if (threadIdx.x % cuda::kWarpSize == cuda::kWarpSize - 1) of_warps[threadIdx.x / cuda::kWarpSize] = map;
  __syncthreads();
  if (threadIdx.x != 0) return;
  UnitMap<Acc> result;
  for (int w = 0; w < kGateWarps; ++w) result = of_warps[w].after(result);
  block.maps_of_row<Acc>(p)[block.tile] = result;
}

template <typename Scalar>
__global__ void __launch_bounds__(kGateThreads, 1) mlstm_gates_kernel(const __grid_constant__ GateParams p) {
  using Acc = cuda::AccumulateType<Scalar>;
  constexpr Acc kNone = UnitMap<Acc>::kNone;
  __shared__ UnitMap<Acc> of_warps[kGateWarps];
  __shared__ Acc units[kGateThreads + 1];  // before each thread's steps, and after the tile
  const GateBlock block(p);
  const int lane = threadIdx.x % cuda::kWarpSize, warp = threadIdx.x / cuda::kWarpSize;
  GateSteps<Scalar> steps(p, block.row, block.head, block.first_step());
  // The rows' first steps begin sequences, so that the unit before a row does not count.
  Acc carried = kNone, after_tile = kNone;
  if (p.is_exp && block.tiles > 1) {
    const UnitMap<Acc>* const maps = block.maps_of_row<Acc>(p);
    carried = compose(maps, block.tile)(kNone);
    after_tile = compose(maps, block.tile + 1)(kNone);
  }
  const UnitMap<Acc> map = steps.map().after_earlier_lanes();
  if (lane == cuda::kWarpSize - 1) of_warps[warp] = map;
  if (threadIdx.x == 0) units[0] = p.is_exp ? carried : Acc(0);
  __syncthreads();
  Acc before_warp = carried;
  for (int w = 0; w < warp; ++w) before_warp = of_warps[w](before_warp);
  const bool ends_tile = threadIdx.x == kGateThreads - 1 && block.tiles > 1;
  units[threadIdx.x + 1] = !p.is_exp ? Acc(0) : ends_tile ? after_tile : map(before_warp);
  __syncthreads();

  Acc unit = units[threadIdx.x];
#pragma unroll
  for (int j = 0; j < kThreadSteps; ++j) {
    if (!steps.is_there(j)) break;
    const Acc before = steps.begins(j) ? steps.initial_unit(j) : unit, forget = steps.log_forget[j];
    const Acc next = j == kThreadSteps - 1 ? units[threadIdx.x + 1] : unit_after(before, steps.i[j], forget, p.is_exp);
    const int64_t place = (block.row * p.seqlen + steps.step(j)) * p.heads + block.head;
    static_cast<Acc*>(p.m)[place] = next;
    static_cast<Acc*>(p.log_decay)[place] = log_decay_between(before, next, forget);
    static_cast<Acc*>(p.gain)[place] = input_gain(steps.i[j], next, p.is_exp);
    steps.keep_if_last(j, next);
    unit = next;
  }
}

template <typename Scalar>
cudaError_t launch_mlstm_gates(const GateParams& params, cudaStream_t stream) {
  const int64_t blocks = params.batch * params.heads * gate_tiles(params.seqlen);
  if (blocks == 0) return cudaSuccess;
  if (gate_maps(params) > 0 && params.is_exp) {
    const cudaError_t error = cuda::launch(mlstm_gate_maps_kernel<Scalar>, blocks, kGateThreads, 0, stream, false, params);
    if (error != cudaSuccess) return error;
  }
  return cuda::launch(mlstm_gates_kernel<Scalar>, blocks, kGateThreads, 0, stream, false, params);
}

}  // namespace ssm_kernels::mlstm
