// Selective scan, backward, on CUDA: a warp scan, parallel in time.
//
// With y_t = <C_t, h_t> + D u_t, out_t = y_t silu(z_t) and dy_t = grad_out_t silu(z_t), the adjoint g of the state runs against
// time,
//
//   g_t = C_t dy_t + Abar_{t+1} g_{t+1}
//
// and with p_t = g_t B_t and q_t = g_t h_{t-1} Abar'(z_t), summed over states, channels or time,
//
//   grad_delta_t = sum_n (A q_t + u_t p_t (z k)')
//   grad_u_t     = delta_t sum_n p_t k + D dy_t
//   grad_z_t     = grad_out_t y_t silu'(z_t)
//   grad_A       = sum_t delta_t (q_t + delta_t u_t p_t k')
//   grad_B_t     = sum_d g_t delta_t u_t k
//   grad_C_t     = sum_d dy_t h_t
//
// If the caller wants them, it also writes the outputs out_t again.
//
// warp_scan.h describes tiles and lanes. A block loops over its tiles from the last to the first; each tile starts from a state
// that forward saved. For each state, a lane computes Abar of its steps once. The maps from step to step are scanned over the
// lanes forwards for the states and backwards for the adjoints. The lane then repeats its steps from the true state and
// adjoint, so that both exist at every step, in registers only.
//
// grad_B and grad_C are summed over channels in a fixed order: over a warp's channels by shuffles, over a block's warps through
// shared memory, a slice of states at a time, and over tiles of channels by bwd_reduce.cuh.
//
// The limit is the issue rate: about thirty instructions per state and step.
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

template <typename TileConfig, typename Method, Pass pass>
__device__ __forceinline__ void bwd_block(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                          const PartialSums& partial_sums, unsigned char* memory,
                                          const MethodParameters& parameters = {}) {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  using AnyTile = AnyBwdTile<TileConfig>;
  constexpr int K = TileConfig::kSteps;
  constexpr int kA = Shared::kA, kBefore = Shared::kBefore, kAdjoint = Shared::kAdjoint, kGradA = Shared::kGradA,
                kPerState = Shared::kPerState;
  const Shared shared(memory, p, plan, pass == Pass::kPerStep);
  const Position& at = *shared.position;
  const BwdRows<Scalar>& rows = *shared.rows;
  if (threadIdx.x == 0) {
    *shared.position = Position(p, plan, blockIdx.x);
    *shared.rows = BwdRows<Scalar>(p, at);
  }
  const int arguments = place_arguments<Scalar, TileConfig::kThreads>(shared.arguments, memory, p, plan);
  clear<TileConfig>(shared.grad_channel, 2 * TileConfig::kThreads);
  const Lane<TileConfig> lane;
  const int dstate = static_cast<int>(p.dstate);
  const bool carry_pass = pass == Pass::kCarry || (pass == Pass::kAny && kAnyCarries<Scalar, Method> && plan.carry_pass);
  const bool has_B_steps = pass == Pass::kPerStep || p.B.per_step, has_C_steps = pass == Pass::kPerStep || p.C.per_step;
  const bool sums_channels = !carry_pass && (p.grad_B.per_step || p.grad_C.per_step);

  // Lanes without a channel add zeros to the sums over channels.
  clear<TileConfig>(shared.states, state_rows<TileConfig>(plan) * state_pitch(p) * kPerState);
  clear<TileConfig>(shared.zeros, K);
  __syncthreads();
  begin_states<Method>(p, plan, shared, at, carry_pass);

  const bool is_channel = lane.channel < at.channels, is_first = lane.is_first(), is_last = lane.is_last();
  const int first_step = lane.time * K;
  const auto row = [&] { return min(lane.channel, state_rows<TileConfig>(plan) - 1); };
  const auto channel = [&] { return at.first_channel + lane.channel; };
  const auto of_channel = [&](const ChannelView& view) {
    if (!is_channel || view.data == nullptr) return Acc(0);
    return static_cast<const Acc*>(view.data)[(at.first_channel + lane.channel) * view.stride];
  };
  const MatrixSlice<TileConfig, Shared::kMaxSlice> B{shared.B}, C{shared.C};
  const BwdBlock<TileConfig> block{p, plan, shared, at, rows, arguments, carry_pass};
  const BwdTiles<TileConfig> inputs{block.u(), block.delta(), block.z(), block.grad_out()};

  const int64_t tiles = (at.end - at.begin + TileConfig::kTileSteps - 1) / TileConfig::kTileSteps;
  for (int64_t t0 = at.begin + (tiles - 1) * TileConfig::kTileSteps; t0 >= at.begin; t0 -= TileConfig::kTileSteps) {
    const int steps = at.steps_from(t0, TileConfig::kTileSteps);
    load_tile(block, t0, steps);

    const int valid = is_channel ? steps - first_step : 0;
    // u itself if the gain is not one: the gradient needs it.
    Acc delta[K], u_or_delta_u[K], dy[K];
    // Sums over the states.
    Acc y[K], grad_input[K], grad_step[K];
    Acc sum_of_delta = 0;
    for (int first_state = 0; first_state < dstate; first_state += plan.slice) {
      const int slice_states = min(plan.slice, dstate - first_state);
      if (first_state > 0) __syncthreads();
      stage_slice(block, B, C, has_B_steps, has_C_steps, first_state, t0, slice_states, steps);
      if (first_state == 0) finish_load(block, t0);
      __syncthreads();

      if (first_state == 0) {
        read_steps<Method>(p, inputs, lane, of_channel, first_step, valid, carry_pass, delta, u_or_delta_u, dy, y, grad_input,
                           grad_step, sum_of_delta);
      }

      const auto run_states = [&](auto tail, auto method) {
        using Known = decltype(method);
        const Acc* B_steps = is_channel ? B.lane(0, lane.time) : shared.zeros;
        const Acc* C_steps = is_channel ? C.lane(0, lane.time) : shared.zeros;
        const int pitch = is_channel ? B.kPitch : 0;
        Acc* entry = shared.states + (row() * state_pitch(p) + first_state) * kPerState;
        Acc* sums = shared.warp_sums + threadIdx.x / kWarpSize * Shared::kSums + sums_of_lane(lane);
        for (int s = 0; s < slice_states;
             ++s, B_steps += pitch, C_steps += pitch, entry += kPerState, sums += Shared::kSumsPerState) {
          const bool is_tail = tail();
          const int state = first_state + s;
          const auto of_state = Vector<Acc, kPerState>::load(entry);
          __syncwarp();  // the first lane of a channel writes what all its lanes have read
          const Acc A = of_state[kA];
          Acc decay = 1;
          if (Known::kExponential && !is_tail) decay = Math<Acc>::exp2(A * sum_of_delta);
          const auto A_at = [&](int j) { return !is_tail || j < opaque(valid) ? A : Acc(0); };
          Acc basis[K] = {};
          const auto transition = [&](int j) { return Transition<Known, Acc>(method, delta[j], A_at(j), basis[j]); };
#pragma unroll
          for (int j = 0; j < K; ++j) {
            basis[j] = Transition<Known, Acc>(method, delta[j], A_at(j)).basis;
            if (!Known::kExponential || is_tail) decay *= transition(j).abar();
          }
          const auto delta_u = [&](int j) { return Known::kUnitGain ? u_or_delta_u[j] : delta[j] * u_or_delta_u[j]; };

          // The lane's maps: from the state before its first step to the state after its last (end), and from the adjoint after
          // its last step to the adjoint before its first (through).
          Vector<Acc, K> b;
          Acc h[K], end = is_first ? of_state[kBefore] : Acc(0);
          [[maybe_unused]] Acc end_decay = decay;
          if (!carry_pass) {
            b = read_matrix<pass, K>(p.B, B_steps, channel(), is_channel, state);
#pragma unroll
            for (int j = 0; j < K; ++j) {
              h[j] = transition(j).input(delta_u(j)) * b[j];
              end = Math<Acc>::fma(transition(j).abar(), end, h[j]);
            }
          }
          const auto c = read_matrix<pass, K>(p.C, C_steps, channel(), is_channel, state);
          Acc through = is_last ? of_state[kAdjoint] : Acc(0), through_decay = decay;
#pragma unroll
          for (int j = K - 1; j >= 0; --j) through = transition(j).abar() * Math<Acc>::fma(dy[j], c[j], through);
          if constexpr (pass == Pass::kCarry) {
            scan_lanes<TileConfig, /*reverse=*/true>(through_decay, through);
          } else {
            scan_lanes_both_ways<TileConfig>(end_decay, end, through_decay, through);
          }
          if (is_first && is_channel) {
            entry[kAdjoint] = through;
            if (carry_pass) shared.decay[row() * state_pitch(p) + state] *= through_decay;
          }
          if (carry_pass) continue;

          // h[j] becomes the state after step j.
          end = shuffle_earlier(end, TileConfig::kLanesPerStep);
          through = shuffle_later(through, TileConfig::kLanesPerStep);
          const Acc h_before = is_first ? entry[kBefore] : end;
          if (is_last) through = of_state[kAdjoint];
          Acc previous_state = h_before;
#pragma unroll
          for (int j = 0; j < K; ++j) previous_state = h[j] = Math<Acc>::fma(transition(j).abar(), previous_state, h[j]);
          if (p.grad_z.data != nullptr || p.replaces_grad_out) {
#pragma unroll
            for (int j = 0; j < K; ++j) y[j] = Math<Acc>::fma(c[j], h[j], y[j]);
          }
          // Doubles and gains need more registers: there B and C are read again at each use.
          constexpr bool is_double = std::is_same_v<Acc, double>, rereads_B = is_double || !Known::kUnitGain;
          constexpr bool rereads_C = is_double || std::is_same_v<Known, Bilinear>;
          const auto b_at = [&](int j) {
            if (rereads_B && has_B_steps) return B_steps[opaque(j)];
            return b[rereads_B ? 0 : j];
          };
          const auto c_at = [&](int j) {
            if (rereads_C && has_C_steps) return C_steps[opaque(j)];
            return c[rereads_C ? 0 : j];
          };
          Acc to_B[K], to_C[K], grad_A = 0;
#pragma unroll
          for (int j = K - 1; j >= 0; --j) {
            const auto step = transition(j);
            const Acc g = Math<Acc>::fma(dy[j], c_at(j), through);
            const Acc previous = j > 0 ? h[j - 1] : h_before;
            through = step.abar() * g;
            Acc q, to_A;
            if constexpr (Known::kExponential) {
              q = through * previous;
            } else {
              q = method.derivatives(step.z, step.basis, current_gain(method, step.z, step.basis)).abar * (g * previous);
            }
            // Past the end, zero times an infinite state would be NaN.
            if (is_tail && j >= opaque(valid)) q = 0;
            if constexpr (Known::kUnitGain) {
              to_A = q;
              grad_input[j] = Math<Acc>::fma(g, b_at(j), grad_input[j]);
              to_B[j] = g * delta_u(j);
            } else {
              const Acc gain = current_gain(method, step.z, step.basis), g_b = g * b_at(j), u_g_b = u_or_delta_u[j] * g_b;
              const auto derivatives = method.derivatives(step.z, step.basis, gain);
              to_A = Math<Acc>::fma(delta[j] * u_g_b, derivatives.gain, q);
              grad_step[j] = Math<Acc>::fma(u_g_b * kScaleOfA<Known, Acc>, derivatives.z_gain, grad_step[j]);
              grad_input[j] = Math<Acc>::fma(g_b, gain, grad_input[j]);
              to_B[j] = g * delta_u(j) * gain;
            }
            grad_step[j] = Math<Acc>::fma(A, q, grad_step[j]);
            grad_A = Math<Acc>::fma(delta[j], to_A, grad_A);
            to_C[j] = dy[j] * h[j];
          }

          grad_A = sum_over_time_lanes<TileConfig>(grad_A);
          if (is_first && is_channel) entry[kGradA] += grad_A;
          if constexpr (pass == Pass::kAny) {
            const auto add_steps = [&](Acc* target, const Acc(&values)[K]) {
              Acc sum = 0;
#pragma unroll
              for (int j = 0; j < K; ++j) sum += values[j];
              sum = sum_over_time_lanes<TileConfig>(sum);
              if (is_first && is_channel) target[row() * state_pitch(p) + state] += sum;
            };
            if (partial_sums.grad_constant_B != nullptr) add_steps(shared.grad_constant_B, to_B);
            if (partial_sums.grad_constant_C != nullptr) add_steps(shared.grad_constant_C, to_C);
          }
          if (sums_channels) store_channel_sums<TileConfig>(to_B, to_C, lane, sums);
        }
      };
      visit_tile<TileConfig, Method, pass>(p, parameters, steps, run_states);
      if (sums_channels) add_slice<TileConfig>(p, plan, partial_sums, shared, at, first_state, t0, steps);
    }

    if (!carry_pass) {
      // The input tiles are intact. The gradients overwrite them once every lane has read its steps.
      const BwdTiles<TileConfig> gradients{
          {shared.u, plan.grad_u}, {shared.delta, plan.grad_delta}, {shared.z, plan.grad_z}, {shared.grad_out, plan.grad_out}};
      const Acc skip = of_channel(p.D);
      if (p.grad_z.data != nullptr || p.replaces_grad_out) {
        Acc gate[K], out[K];
        inputs.u.read(lane.channel, first_step, gate);
#pragma unroll
        for (int j = 0; j < K; ++j) y[j] = Math<Acc>::fma(skip, gate[j], y[j]);
        if (p.z.data != nullptr) inputs.z.read(lane.channel, first_step, gate);
        if (p.replaces_grad_out) {
#pragma unroll
          for (int j = 0; j < K; ++j) out[j] = p.z.data != nullptr ? y[j] * silu(gate[j]) : y[j];
        }
        if (p.grad_z.data != nullptr) {
#pragma unroll
          for (int j = 0; j < K; ++j) y[j] *= silu_derivative(gate[j], sigmoid(gate[j]));
          if (p.grad_out.data != nullptr) inputs.grad_out.read(lane.channel, first_step, gate);
#pragma unroll
          for (int j = 0; j < K; ++j) y[j] *= p.grad_out.data != nullptr ? gate[j] : Acc(0);
        }
        __syncthreads();
        if (p.grad_z.data != nullptr) gradients.z.write(lane.channel, first_step, y);
        if (p.replaces_grad_out) gradients.grad_out.write(lane.channel, first_step, out);
      }
      // Read here, not above, to save registers.
      Acc u[K], raw[K];
      inputs.u.read(lane.channel, first_step, u);
      inputs.delta.read(lane.channel, first_step, raw);
      const Acc bias = of_channel(p.delta_bias);
      const bool has_delta = input_has_delta<Method>(p), multiplies = has_unit_gain<Method>(p) && has_delta;
      const Acc scale = scale_of_A<Method, Acc>(p);
      Acc grad_D = 0, grad_bias = 0;
#pragma unroll
      for (int j = 0; j < K; ++j) {
        Acc grad_delta = grad_step[j] * (1 / scale);
        if (multiplies) grad_delta = Math<Acc>::fma(u[j], grad_input[j], grad_delta);
        if (p.delta_softplus) grad_delta *= softplus_derivative(raw[j] + bias);
        if (j < valid) {
          grad_bias += grad_delta;
          grad_D = Math<Acc>::fma(dy[j], u[j], grad_D);
        }
        grad_input[j] = Math<Acc>::fma(has_delta ? delta[j] : Acc(1), grad_input[j], skip * dy[j]);
        grad_step[j] = grad_delta;
      }
      Acc* const grad_channel = shared.grad_channel + opaque_thread();
      grad_channel[0] += grad_D;
      grad_channel[TileConfig::kThreads] += grad_bias;
      __syncthreads();
      gradients.u.write(lane.channel, first_step, grad_input);
      gradients.delta.write(lane.channel, first_step, grad_step);
      __syncthreads();
      if (has_shifted_vectors<Scalar>(plan)) {
        AnyTile::store(arguments, t0);
      } else {
        if (p.grad_u.data != nullptr) gradients.u.store(p.grad_u, rows.grad_u, t0, at.channels, steps);
        if (p.grad_delta.data != nullptr) gradients.delta.store(p.grad_delta, rows.grad_delta, t0, at.channels, steps);
        if (p.grad_z.data != nullptr) gradients.z.store(p.grad_z, rows.grad_z, t0, at.channels, steps);
        if (p.replaces_grad_out) gradients.grad_out.store(p.grad_out, rows.grad_out, t0, at.channels, steps);
      }
    }
    __syncthreads();
  }

  if (at.begin >= at.end) __syncthreads();
  store_sums<TileConfig>(p, plan, partial_sums, shared, at, lane, is_channel, carry_pass);
}

// Warps per multiprocessor: 16 allow a thread 128 registers; doubles and Pass::kAny need more, the carry pass fewer.
template <typename Scalar, Pass pass>
constexpr int kBwdResidentWarps = pass == Pass::kAny || std::is_same_v<Scalar, double> ? 8
                                  : pass == Pass::kCarry                               ? 24
                                                                                       : 16;

template <typename Scalar, typename Method, Pass pass>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads,
                                  kBwdResidentWarps<Scalar, pass> / BwdTileConfig<Scalar>::kWarps)
    warp_scan_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params, const __grid_constant__ ScanPlan plan,
                         const __grid_constant__ PartialSums partial_sums) {
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  bwd_block<BwdTileConfig<Scalar>, Method, pass>(params, plan, partial_sums, memory);
}

template <typename Scalar>
int64_t shared_bytes(const SelectiveScanBwdParams& params, const ScanPlan& plan) {
  return BwdShared<BwdTileConfig<Scalar>>(nullptr, params, plan).bytes;
}

template <typename Scalar, typename Method>
cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const ScanPlan& plan, const PartialSums& partial_sums,
                       cudaStream_t stream) {
  // With doubles, a kernel for several methods spills registers: common methods have their own.
  using AnyMethod = std::conditional_t<std::is_same_v<Scalar, double>, OwnOrRareMethod<Method>, RuntimeMethod>;
  auto* kernel = warp_scan_bwd_kernel<Scalar, AnyMethod, Pass::kAny>;
  if constexpr (kHasCommonPasses<Scalar>) {
    if constexpr (kIsCommon<Method>) {
      if (params.B.per_step && params.C.per_step) kernel = warp_scan_bwd_kernel<Scalar, Method, Pass::kPerStep>;
    }
    if (plan.carry_pass) kernel = warp_scan_bwd_kernel<Scalar, RuntimeMethod, Pass::kCarry>;
  }
  return launch_blocks(kernel, BwdTileConfig<Scalar>::kThreads, shared_bytes<Scalar>(params, plan), stream, params, plan,
                       partial_sums);
}

}  // namespace ssm_kernels::selective_scan::warp_scan
