// Warp scan, backward: the parts of a block's tile but the scan itself. It starts and finishes the copies of the inputs, sums
// the gradients of B and C over channels, and stores the sums over time.
#pragma once

#include "common/activations.h"
#include "selective_scan/cuda/states.cuh"
#include "selective_scan/cuda/transition.cuh"
#include "selective_scan/cuda/warp_scan_bwd_shared.cuh"

namespace ssm_kernels::selective_scan::warp_scan {

// Loads the states before a tile from (channels, dstate), zeros if `source` is null, with several loads in flight: the block
// waits for them.
template <typename TileConfig>
__device__ __forceinline__ void load_states_before(const SelectiveScanParams& p, const ScanPlan& plan,
                                                   const BwdShared<TileConfig>& shared, const typename TileConfig::Acc* source,
                                                   int channels) {
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  constexpr int kInFlight = 4;
  const int dstate = static_cast<int>(p.dstate), count = channels * dstate;
#pragma unroll 1
  for (int first = opaque_thread(); first < count; first += kInFlight * TileConfig::kThreads) {
    Acc states[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = first + j * TileConfig::kThreads;
      states[j] = source != nullptr && i < count ? source[i] : Acc(0);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = first + j * TileConfig::kThreads;
      const int channel = static_cast<int>(plan.dstate.divide(static_cast<uint32_t>(i)));
      const int index = channel * state_pitch(p) + i - channel * dstate;
      if (i < count) shared.states[index * Shared::kPerState + Shared::kBefore] = states[j];
    }
  }
}

// Sums each step's values over the warp's channels and stores the sums, (2, steps of the tile).
template <typename TileConfig>
__device__ __forceinline__ void store_channel_sums(typename TileConfig::Acc (&to_B)[TileConfig::kSteps],
                                                   typename TileConfig::Acc (&to_C)[TileConfig::kSteps],
                                                   const Lane<TileConfig>& lane, typename TileConfig::Acc* target) {
  using Acc = typename TileConfig::Acc;
  static_assert(TileConfig::kSteps == 8 && TileConfig::kLanesPerStep == 4, "four lanes share two times eight sums");
  const int quarter = lane.channel_in_warp;
  Vector<Acc, 4> mine;
  Acc half[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    half[j] = (quarter & 2 ? to_C[j] : to_B[j]) + __shfl_xor_sync(kAllLanes, quarter & 2 ? to_B[j] : to_C[j], 2);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Acc sent = quarter & 1 ? half[i] : half[4 + i];
    mine.set(i, (quarter & 1 ? half[4 + i] : half[i]) + __shfl_xor_sync(kAllLanes, sent, 1));
  }
  mine.store(target);
}

// The offset of a lane's four sums.
template <typename TileConfig>
__device__ __forceinline__ int sums_of_lane(const Lane<TileConfig>& lane) {
  return lane.channel_in_warp / 2 * TileConfig::kTileSteps + lane.time * TileConfig::kSteps + lane.channel_in_warp % 2 * 4;
}

template <typename TileConfig>
__device__ __forceinline__ typename TileConfig::Acc sum_over_time_lanes(typename TileConfig::Acc value) {
#pragma unroll
  for (int distance = TileConfig::kLanesPerStep; distance < kWarpSize; distance *= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Sums grad_B and grad_C of a slice of states over the block's warps and stores the block's partial sums. Called by the whole
// block.
template <typename TileConfig>
__device__ __forceinline__ void add_slice(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                          const PartialSums& partial_sums, const BwdShared<TileConfig>& shared,
                                          const Position& at, int first_state, int64_t first_step, int steps) {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  constexpr int kVector = kVectorSize<Acc>;
  __syncthreads();
  const int count = min(plan.slice, static_cast<int>(p.dstate) - first_state) * Shared::kSums;
#pragma unroll 1
  for (int i = opaque_thread() * kVector; i < count; i += TileConfig::kThreads * kVector) {
    const Acc* const sums = shared.warp_sums + i / Shared::kSums * Shared::kSumsPerState + i % Shared::kSums;
    auto sum = Vector<Acc, kVector>::load(sums);
#pragma unroll
    for (int warp = 1; warp < TileConfig::kWarps; ++warp) {
      const auto part = Vector<Acc, kVector>::load(sums + warp * Shared::kSums);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum.set(j, sum[j] + part[j]);
    }
    const int state = first_state + i / Shared::kSums, step = i % TileConfig::kTileSteps;
    const bool is_B = i / TileConfig::kTileSteps % 2 == 0;
    store_matrix_sum<Scalar>(p, partial_sums, at, is_B, state, first_step + step, steps - step, sum);
  }
}

// Tiles in shared memory: of the inputs, or of the results that overwrite them (the gradients of u, delta and z, and out in
// place of grad_out).
template <typename TileConfig>
struct BwdTiles {
  SequenceTile<TileConfig> u, delta, z, grad_out;
};

// A block of the backward kernel: its functions share these members.
template <typename TileConfig>
struct BwdBlock {
  using Scalar = typename TileConfig::Scalar;
  using Sequence = SequenceTile<TileConfig>;

  const SelectiveScanBwdParams& p;
  const ScanPlan& plan;
  const BwdShared<TileConfig>& shared;
  const Position& at;
  const BwdRows<Scalar>& rows;
  int arguments;  // their place in shared memory
  bool carry_pass;

  __device__ __forceinline__ Sequence u() const { return {shared.u, plan.u}; }
  __device__ __forceinline__ Sequence delta() const { return {shared.delta, plan.delta}; }
  __device__ __forceinline__ Sequence z() const { return {shared.z, plan.z}; }
  __device__ __forceinline__ Sequence grad_out() const { return {shared.grad_out, plan.grad_out}; }
};

// Writes the scaled A of each state, and its adjoint after the block's steps: the gradient of the last state, and the maps of
// the segments after this one. A carry pass begins with the identity.
template <typename Method, typename TileConfig>
__device__ __forceinline__ void begin_states(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                             const BwdShared<TileConfig>& shared, const Position& at, bool carry_pass) {
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  constexpr int kA = Shared::kA, kAdjoint = Shared::kAdjoint, kPerState = Shared::kPerState;
  for_each_state<TileConfig>(p, plan, at.channels, [&](int index, int, int channel, int state) {
    const int64_t d = at.first_channel + channel;
    Acc g = 0;
    if (carry_pass) {
      shared.decay[index] = 1;
    } else {
      g = load_optional_state<Acc>(p.grad_last_state, at.last, d, state);
      for (int64_t s = plan.segments - 1; s > at.segment; --s) {
        g = fold_segment(plan, state_offset(p, at.row * plan.segments + s, d, state), g);
      }
      if (!p.B.per_step) shared.grad_constant_B[index] = 0;
      if (!p.C.per_step) shared.grad_constant_C[index] = 0;
    }
    shared.states[index * kPerState + kA] = load_bounded_A<Acc>(p, d, state) * scale_of_A<Method, Acc>(p);
    shared.states[index * kPerState + kAdjoint] = g;
  });
}

// Starts the copies of a tile's sequences, and loads the states before it.
template <typename TileConfig>
__device__ __forceinline__ void load_tile(const BwdBlock<TileConfig>& block, int64_t t0, int steps) {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using AnyTile = AnyBwdTile<TileConfig>;
  const auto& [p, plan, shared, at, rows, arguments, carry_pass] = block;
  if (has_shifted_vectors<Scalar>(plan)) {
    AnyTile::load(arguments, t0);
  } else {
    block.delta().load(p.delta, rows.delta, t0, at.channels, steps);
    if (p.grad_out.data != nullptr) block.grad_out().load(p.grad_out, rows.grad_out, t0, at.channels, steps);
    if (p.z.data != nullptr) block.z().load(p.z, rows.z, t0, at.channels, steps);
    if (!carry_pass) block.u().load(p.u, rows.u, t0, at.channels, steps);
  }
  if (!carry_pass) {
    const int chunks = TileConfig::kTileSteps / (p.chunk_length == kLongChunk ? kLongChunk : kShortChunk);  // of a tile
    const Acc* const source = rows.states_before(p, t0 / TileConfig::kTileSteps * chunks);
    load_states_before<TileConfig>(p, plan, shared, source, at.channels);
  }
}

// Starts the copies of B and C of a slice of states.
template <typename TileConfig>
__device__ __forceinline__ void stage_slice(const BwdBlock<TileConfig>& block,
                                            const MatrixSlice<TileConfig, BwdShared<TileConfig>::kMaxSlice>& B,
                                            const MatrixSlice<TileConfig, BwdShared<TileConfig>::kMaxSlice>& C,
                                            bool has_B_steps, bool has_C_steps, int first_state, int64_t t0, int slice_states,
                                            int steps) {
  using Scalar = typename TileConfig::Scalar;
  using AnyTile = AnyBwdTile<TileConfig>;
  const auto& [p, plan, shared, at, rows, arguments, carry_pass] = block;
  if (has_shifted_vectors<Scalar>(plan)) {
    AnyTile::stage(arguments, first_state, t0);
  } else {
    if (has_B_steps && !carry_pass) B.stage(plan.B, p.B, rows.B, first_state, t0, slice_states, steps);
    if (has_C_steps) C.stage(plan.C, p.C, rows.C, first_state, t0, slice_states, steps);
  }
}

// Waits for the copies of a tile's sequences. The block synchronizes next.
template <typename TileConfig>
__device__ __forceinline__ void finish_load(const BwdBlock<TileConfig>& block, int64_t t0) {
  using Scalar = typename TileConfig::Scalar;
  using AnyTile = AnyBwdTile<TileConfig>;
  const auto& [p, plan, shared, at, rows, arguments, carry_pass] = block;
  cuda::cp_async_wait();
  if (has_shifted_vectors<Scalar>(plan)) {
    AnyTile::finish_load(arguments, t0);
  } else {
    block.delta().finish_load();
    if (p.grad_out.data != nullptr) block.grad_out().finish_load();
    if (p.z.data != nullptr) block.z().finish_load();
    if (!carry_pass) block.u().finish_load();
  }
}

// Reads a lane's steps from the tiles, and begins the sums over the states. A carry pass has no u.
template <typename Method, typename TileConfig, typename OfChannel>
__device__ __forceinline__ void read_steps(const SelectiveScanBwdParams& p, const BwdTiles<TileConfig>& tiles,
                                           const Lane<TileConfig>& lane, const OfChannel& of_channel, int first_step, int valid,
                                           bool carry_pass, typename TileConfig::Acc (&delta)[TileConfig::kSteps],
                                           typename TileConfig::Acc (&u_or_delta_u)[TileConfig::kSteps],
                                           typename TileConfig::Acc (&dy)[TileConfig::kSteps],
                                           typename TileConfig::Acc (&y)[TileConfig::kSteps],
                                           typename TileConfig::Acc (&grad_input)[TileConfig::kSteps],
                                           typename TileConfig::Acc (&grad_step)[TileConfig::kSteps],
                                           typename TileConfig::Acc& sum_of_delta) {
  using Acc = typename TileConfig::Acc;
  constexpr int K = TileConfig::kSteps;
  const Acc bias = of_channel(p.delta_bias);
  tiles.delta.read(lane.channel, first_step, delta);
  if (!carry_pass) tiles.u.read(lane.channel, first_step, u_or_delta_u);
  if (p.grad_out.data != nullptr) {
    tiles.grad_out.read(lane.channel, first_step, dy);
    if (p.z.data != nullptr) {
      tiles.z.read(lane.channel, first_step, y);
#pragma unroll
      for (int j = 0; j < K; ++j) dy[j] *= silu(y[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < K; ++j) dy[j] = 0;
  }
  make_step_sizes(delta, bias, p.delta_softplus, valid);
  const bool has_delta = input_has_delta<Method>(p), multiplies = has_unit_gain<Method>(p) && has_delta;
#pragma unroll
  for (int j = 0; j < K; ++j) {
    // An infinite step leaves the states of methods without delta finite: its gradient is zero, not the NaN of zero times
    // infinity.
    if (!has_delta) delta[j] = Math<Acc>::min(delta[j], kLargestRate<Acc>);
    if (multiplies) u_or_delta_u[j] *= delta[j];
    y[j] = grad_input[j] = grad_step[j] = 0;
    sum_of_delta += delta[j];
  }
}

// Stores the block's sums over time: the gradients of A, constant B and C, D, delta_bias and the initial state; or the map of
// the segment.
template <typename TileConfig>
__device__ __forceinline__ void store_sums(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                           const PartialSums& partial_sums, const BwdShared<TileConfig>& shared,
                                           const Position& at, const Lane<TileConfig>& lane, bool is_channel, bool carry_pass) {
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  constexpr int kAdjoint = Shared::kAdjoint, kGradA = Shared::kGradA, kPerState = Shared::kPerState;
  const int64_t segment_row = at.row * plan.segments + at.segment;
  for_each_state<TileConfig>(p, plan, at.channels, [&](int index, int, int channel, int state) {
    const int64_t target = state_offset(p, segment_row, at.first_channel + channel, state);
    if (carry_pass) {
      static_cast<Acc*>(plan.decay)[target] = shared.decay[index];
      static_cast<Acc*>(plan.offset)[target] = shared.states[index * kPerState + kAdjoint];
      return;
    }
    const auto store = [&](void* sums, Acc sum) {
      if (sums != nullptr) static_cast<Acc*>(sums)[target] = sum;
    };
    store(partial_sums.grad_A, shared.states[index * kPerState + kGradA]);
    store(partial_sums.grad_constant_B, p.B.per_step ? Acc(0) : shared.grad_constant_B[index]);
    store(partial_sums.grad_constant_C, p.C.per_step ? Acc(0) : shared.grad_constant_C[index]);
    if (p.grad_initial_state != nullptr && at.segment == 0 && at.initial >= 0) {
      static_cast<Acc*>(p.grad_initial_state)[state_offset(p, at.initial, at.first_channel + channel, state)] =
          shared.states[index * kPerState + kAdjoint];
    }
  });
  if (!carry_pass) {
    const Acc grad_D = sum_over_time_lanes<TileConfig>(shared.grad_channel[threadIdx.x]);
    const Acc grad_bias = sum_over_time_lanes<TileConfig>(shared.grad_channel[TileConfig::kThreads + threadIdx.x]);
    if (lane.is_first() && is_channel) {
      const int64_t target = segment_row * p.dim + at.first_channel + lane.channel;
      if (partial_sums.grad_D != nullptr) static_cast<Acc*>(partial_sums.grad_D)[target] = grad_D;
      if (partial_sums.grad_delta_bias != nullptr) static_cast<Acc*>(partial_sums.grad_delta_bias)[target] = grad_bias;
    }
  }
}

}  // namespace ssm_kernels::selective_scan::warp_scan
