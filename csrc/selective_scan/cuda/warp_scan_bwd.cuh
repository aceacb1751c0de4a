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
// Methods that read two samples add a term of step t + 1 to the gradients of u_t and B_t, which passes from the lane after to
// the lane before, and from tile to tile (two_sample_forms.cuh, warp_scan_two_sample.cuh).
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
#include "selective_scan/cuda/warp_scan_bwd_tile.cuh"
#include "selective_scan/cuda/warp_scan_two_sample.cuh"

namespace ssm_kernels::selective_scan::warp_scan {

template <typename TileConfig, typename Method, Pass pass>
__device__ __forceinline__ void bwd_block(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                          const PartialSums& partial_sums, unsigned char* memory,
                                          const MethodParameters& parameters = {},
                                          const TwoSampleBlock<TileConfig>& samples = {}) {
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
  constexpr bool kTwoSample = kIsTwoSample<Method>;
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
  // The gradient of u that the step after the tile adds to its last step, of the lane's channel.
  [[maybe_unused]] Acc carry_of_u = 0;
  if constexpr (kTwoSample) samples.clear_carry();

  const int64_t tiles = (at.end - at.begin + TileConfig::kTileSteps - 1) / TileConfig::kTileSteps;
  // Two samples: warp_scan_two_sample.cuh says what a block does with the first step of the next segment.
  const int later_tiles = kTwoSample && at.segment + 1 < plan.segments ? 1 : 0;
  [[maybe_unused]] const int64_t end = at.end;
  if constexpr (kTwoSample) {
    // Whole tiles are loaded: vectors of descending steps have no parts.
    if (later_tiles > 0) samples.set_end(shared.position, min(end + TileConfig::kTileSteps, p.seqlen));
  }
  for (int64_t t0 = at.begin + (tiles - 1 + later_tiles) * TileConfig::kTileSteps; t0 >= at.begin;
       t0 -= TileConfig::kTileSteps) {
    const bool is_later = kTwoSample && t0 >= end;
    const int loaded = at.steps_from(t0, TileConfig::kTileSteps), steps = is_later ? 1 : loaded;
    load_tile(block, t0, loaded);

    const int valid = is_channel ? steps - first_step : 0;
    // u itself if the gain is not one: the gradient needs it.
    Acc delta[K], u_or_delta_u[K], dy[K];
    // Sums over the states.
    Acc y[K], grad_input[K], grad_step[K];
    Acc sum_of_delta = 0;
    // Methods with two samples need the factors of B_{t-1}, the sums that `grad_input` has for the current sample, and the step
    // size of the previous sample of the lane's first step.
    [[maybe_unused]] Acc of_previous[K], grad_previous[K], first_size = 0;
    // Methods with a step of its own for A, which `delta` has, need the steps of the input, and the sums for their gradients.
    [[maybe_unused]] Acc own[K], grad_own[K];
    [[maybe_unused]] const bool repeats = kTwoSample && t0 == 0 && is_first && samples.repeats(at);
    for (int first_state = 0; first_state < dstate; first_state += plan.slice) {
      const int slice_states = min(plan.slice, dstate - first_state);
      if (first_state > 0) __syncthreads();
      stage_slice(block, B, C, has_B_steps, has_C_steps, first_state, t0, slice_states, loaded);
      if constexpr (kTwoSample) {
        if (has_B_steps && !carry_pass) samples.stage_B_before(p, plan, at, rows.B, first_state, slice_states, t0);
      }
      if (first_state == 0) finish_load(block, t0);
      __syncthreads();

      if (first_state == 0) {
        read_steps<Method>(p, inputs, lane, of_channel, first_step, valid, carry_pass, delta, u_or_delta_u, dy, y, grad_input,
                           grad_step, sum_of_delta);
        if constexpr (kHasDeltaA<Method>) {
          samples.read_delta_A(at, lane.channel, t0 + first_step, valid, input_has_delta<Method>(p), delta, own);
          sum_of_delta = 0;
#pragma unroll
          for (int j = 0; j < K; ++j) {
            sum_of_delta += delta[j];
            grad_own[j] = 0;
          }
        }
        if constexpr (kTwoSample) {
          if (is_later) samples.zero_from(valid, dy);
          if (carry_pass) {
            if (t0 == at.begin && is_first) samples.skip_first(delta, dy, sum_of_delta);
          } else {
            samples.weigh(p, plan, at, lane, rows.u, t0, valid, kHasDeltaA<Method> ? own : delta, u_or_delta_u, of_previous,
                          first_size);
#pragma unroll
            for (int j = 0; j < K; ++j) grad_previous[j] = 0;
          }
        }
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
          const auto delta_u = [&](int j) {
            if constexpr (kIsSeparate<Method> && !Known::kUnitGain) return own[j] * u_or_delta_u[j];
            return Known::kUnitGain ? u_or_delta_u[j] : delta[j] * u_or_delta_u[j];
          };
          [[maybe_unused]] Acc b_before = 0, carry_of_B = 0;  // of the lane's first step, and from the step after its last

          // The lane's maps: from the state before its first step to the state after its last (end), and from the adjoint after
          // its last step to the adjoint before its first (through).
          Vector<Acc, K> b;
          Acc h[K], end = is_first ? of_state[kBefore] : Acc(0);
          [[maybe_unused]] Acc end_decay = decay;
          if (!carry_pass) {
            b = read_matrix<pass, K>(p.B, B_steps, channel(), is_channel, state);
#pragma unroll
            for (int j = 0; j < K; ++j) {
              if constexpr (kTwoSample) {
                if (j == 0) b_before = has_B_steps ? samples.B_before(B_steps, s, is_first, is_channel) : b[0];
                h[j] = transition(j).inputs(u_or_delta_u[j] * b[j], of_previous[j] * (j > 0 ? b[j > 0 ? j - 1 : 0] : b_before));
              } else if constexpr (kIsSeparate<Method> && !Known::kUnitGain) {
                h[j] = delta_u(j) * method.own_gain(own[j] * A_at(j)) * b[j];
              } else {
                h[j] = transition(j).input(delta_u(j)) * b[j];
              }
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
            if constexpr (kTwoSample) {
              const auto terms = samples.terms(step, g, previous, u_or_delta_u[j], of_previous[j], b_at(j),
                                               j > 0 ? b_at(j > 0 ? j - 1 : 0) : b_before);
              q = terms.of_z;
              grad_input[j] = Math<Acc>::fma(terms.current, b_at(j), grad_input[j]);
              grad_previous[j] = Math<Acc>::fma(terms.previous, j > 0 ? b_at(j > 0 ? j - 1 : 0) : b_before, grad_previous[j]);
              to_B[j] = terms.current * u_or_delta_u[j];
              const Acc before = terms.previous * of_previous[j];
              if (j + 1 < K) to_B[j] += carry_of_B;
              carry_of_B = before;
              if (j == 0)
                samples.store_first(p, at, lane.channel, state, t0, is_first && is_channel, terms.previous * first_size);
            } else if constexpr (Known::kExponential) {
              q = through * previous;
            } else {
              q = method.derivatives(step.z, step.basis, current_gain(method, step.z, step.basis)).abar * (g * previous);
            }
            // Past the end, zero times an infinite state would be NaN.
            if (is_tail && j >= opaque(valid)) q = 0;
            if constexpr (kTwoSample) {
              to_A = q;
            } else if constexpr (Known::kUnitGain) {
              to_A = q;
              grad_input[j] = Math<Acc>::fma(g, b_at(j), grad_input[j]);
              to_B[j] = g * delta_u(j);
            } else if constexpr (kIsSeparate<Method>) {
              const auto gain = method.own(own[j] * A_at(j));
              const Acc g_b = g * b_at(j), u_g_b = u_or_delta_u[j] * g_b;
              to_A = q;
              grad_A = Math<Acc>::fma(own[j] * own[j] * u_g_b, gain.derivative, grad_A);
              grad_own[j] = Math<Acc>::fma(u_g_b, gain.z_gain, grad_own[j]);
              grad_input[j] = Math<Acc>::fma(g_b, gain.gain, grad_input[j]);
              to_B[j] = g * delta_u(j) * gain.gain;
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

          if constexpr (kTwoSample)
            samples.move_to_step_before(lane, state, has_B_steps, t0 > 0 || !is_first, repeats, carry_of_B, to_B);
          if (is_later) continue;
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
      if (sums_channels && !is_later) add_slice<TileConfig>(p, plan, partial_sums, shared, at, first_state, t0, steps);
    }

    if constexpr (kTwoSample) {
      if (is_later && !carry_pass) {
        Acc u[K], of_u[K];
        inputs.u.read(lane.channel, first_step, u);
        samples.finish(p, plan, at, lane, rows.u, t0, valid, false, false, kHasDeltaA<Method> ? own : delta, u, grad_input,
                       grad_previous, of_u, carry_of_u);
      }
      if (is_later) samples.set_end(shared.position, end);
    }
    if (!carry_pass && !is_later) {
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
      [[maybe_unused]] Acc of_u[K], grad_delta_A[K];
      if constexpr (kTwoSample) {
        samples.finish(p, plan, at, lane, rows.u, t0, valid, repeats, true, kHasDeltaA<Method> ? own : delta, u, grad_input,
                       grad_previous, of_u, carry_of_u);
      }
#pragma unroll
      for (int j = 0; j < K; ++j) {
        Acc grad_delta = grad_step[j] * (1 / scale);
        if constexpr (kHasDeltaA<Method>) {
          grad_delta_A[j] = grad_delta;
          grad_delta = kTwoSample ? Acc(0) : grad_own[j];
        }
        if constexpr (kTwoSample) grad_delta += grad_previous[j];
        if (multiplies) grad_delta = Math<Acc>::fma(u[j], grad_input[j], grad_delta);
        if (p.delta_softplus) grad_delta *= softplus_derivative(raw[j] + bias);
        if (j < valid) {
          grad_bias += grad_delta;
          grad_D = Math<Acc>::fma(dy[j], u[j], grad_D);
        }
        if constexpr (kTwoSample) {
          grad_input[j] = Math<Acc>::fma(skip, dy[j], of_u[j]);
        } else if constexpr (kIsSeparate<Method>) {
          grad_input[j] = Math<Acc>::fma(own[j], grad_input[j], skip * dy[j]);
        } else {
          grad_input[j] = Math<Acc>::fma(has_delta ? delta[j] : Acc(1), grad_input[j], skip * dy[j]);
        }
        grad_step[j] = grad_delta;
      }
      if constexpr (kHasDeltaA<Method>) samples.store_grad_delta_A(at, lane.channel, t0 + first_step, valid, grad_delta_A);
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
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads,
                                  kBwdResidentWarps<Scalar, Pass::kAny> / BwdTileConfig<Scalar>::kWarps)
    warp_scan_two_sample_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params,
                                    const __grid_constant__ ScanPlan plan, const __grid_constant__ PartialSums partial_sums,
                                    const __grid_constant__ TwoSampleParams two) {
  using C = BwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ typename C::Acc before[BwdSizes::kMaxSlice];
  __shared__ typename C::Acc carry_of_B[C::kWarps * kMaxDstate];
  bwd_block<C, TwoSampleMethod, Pass::kAny>(params, plan, partial_sums, memory, two.method,
                                            {&two, before, carry_of_B, static_cast<int>(params.dstate)});
}

template <typename Scalar>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads,
                                  kBwdResidentWarps<Scalar, Pass::kAny> / BwdTileConfig<Scalar>::kWarps)
    warp_scan_separate_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params, const __grid_constant__ ScanPlan plan,
                                  const __grid_constant__ PartialSums partial_sums,
                                  const __grid_constant__ TwoSampleParams two) {
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  bwd_block<BwdTileConfig<Scalar>, SeparateMethod, Pass::kAny>(params, plan, partial_sums, memory, {}, {&two});
}

template <typename Scalar>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads,
                                  kBwdResidentWarps<Scalar, Pass::kAny> / BwdTileConfig<Scalar>::kWarps)
    warp_scan_separate_two_sample_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params,
                                             const __grid_constant__ ScanPlan plan,
                                             const __grid_constant__ PartialSums partial_sums,
                                             const __grid_constant__ TwoSampleParams two) {
  using C = BwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ typename C::Acc before[BwdSizes::kMaxSlice];
  __shared__ typename C::Acc carry_of_B[C::kWarps * kMaxDstate];
  bwd_block<C, SeparateTwoSampleMethod, Pass::kAny>(params, plan, partial_sums, memory, {},
                                                    {&two, before, carry_of_B, static_cast<int>(params.dstate)});
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

template <typename Scalar>
cudaError_t launch_two_sample_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two, const ScanPlan& plan,
                                  const PartialSums& partial_sums, cudaStream_t stream) {
  return launch_blocks(warp_scan_two_sample_bwd_kernel<Scalar>, BwdTileConfig<Scalar>::kThreads,
                       shared_bytes<Scalar>(params, plan), stream, params, plan, partial_sums, two);
}

template <typename Scalar>
cudaError_t launch_separate_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two, const ScanPlan& plan,
                                const PartialSums& partial_sums, cudaStream_t stream) {
  const auto kernel = params.discretization == Discretization::kExpTrapezoidal
                          ? warp_scan_separate_two_sample_bwd_kernel<Scalar>
                          : warp_scan_separate_bwd_kernel<Scalar>;
  return launch_blocks(kernel, BwdTileConfig<Scalar>::kThreads, shared_bytes<Scalar>(params, plan), stream, params, plan,
                       partial_sums, two);
}

}  // namespace ssm_kernels::selective_scan::warp_scan
