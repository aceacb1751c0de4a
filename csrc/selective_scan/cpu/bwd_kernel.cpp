// Selective scan, backward, on the CPU.
//
// With g_t = dL/dh_t = Abar_{t+1} g_{t+1} + C_t dy_t, dy = grad_out silu(z), v_t = B_t u_t, c_t = delta_t k(z_t), z_t = delta_t
// A:
//
//   grad_C_t     += dy_t h_t                      (sum over the channels of a group)
//   grad_B_t     += g_t c_t u_t                   (likewise)
//   grad_u_t      = D dy_t + sum_n g_t c_t B_t
//   grad_delta_t  = sum_n g_t h_{t-1} A Abar' + g_t v_t (z k)'
//   grad_A       += delta_t (g_t h_{t-1} Abar' + g_t v_t delta_t k')
//
// Abar may be zero or negative, so h_{t-1} is never recovered from h_t. Each chunk recomputes its states from the saved state
// before it and keeps them, with the method's basis (its one expensive value), for the reverse loop.
//
// A SIMD lane is a channel, as in forward. The gradients of a per-step B and C are summed over a task's blocks lane by lane,
// then over lanes; bwd_reduce adds the tasks' sums in order. There are no atomics, and the bits do not depend on the number of
// threads. Sums over time are taken chunk by chunk and then over chunks, so that rounding errors do not grow with every step.
// To bound the workspace, all tasks finish a sweep of some chunks before the next begins. Chunks are visited from last to
// first, with grad_state carried between them. This file is compiled once per instruction set.

#include "selective_scan/cpu/complex_kernel.h"
#include "selective_scan/cpu/kernel.h"
#include "selective_scan/cpu/two_sample_kernel.h"

namespace ssm_kernels::selective_scan {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Acc>
struct BwdTiles {
  Acc *u, *raw_delta, *delta, *z, *grad_out, *dy, *y, *out, *grad_u, *grad_delta;  // [step][lane]
  Acc *lam, *grad_lam, *delta_A, *grad_delta_A;                                    // [step][lane]
  Acc *B_steps, *C_steps;                                                          // [step][padded state]
  Acc *A, *B_constant, *C_constant;                                                // [state][lane]
  Acc *states, *basis;                                                             // [step][state][lane]
  // [step][state][lane], of the task. [state][lane], of a block, for a constant B or C, and for gradients that are not needed:
  // the loop over states then has no branch.
  Acc *grad_B_lanes, *grad_C_lanes;
  Acc* grad_A;  // [state][lane]

  BwdTiles(Scratch& scratch, const SelectiveScanBwdParams& p, const Blocking& blocking) {
    const int64_t sequence = p.chunk_length * blocking.lanes;
    const int64_t padded_states = blocking.padded_dstate * blocking.lanes;
    const int64_t states_per_step = p.dstate * blocking.lanes;
    u = rows_of_samples<Acc>(scratch, blocking, blocking.lanes);
    for (Acc** tile : {&raw_delta, &delta, &z, &grad_out, &dy, &y, &out, &grad_u, &grad_delta})
      *tile = scratch.allocate<Acc>(sequence);
    for (Acc** tile : {&lam, &grad_lam}) *tile = scratch.allocate<Acc>(has_lam(blocking) ? sequence : 0);
    for (Acc** tile : {&delta_A, &grad_delta_A}) *tile = scratch.allocate<Acc>(has_delta_A(blocking) ? sequence : 0);
    B_steps = p.B.per_step ? rows_of_samples<Acc>(scratch, blocking, blocking.padded_dstate) : nullptr;
    C_steps = scratch.allocate<Acc>(p.C.per_step ? p.chunk_length * blocking.padded_dstate : 0);
    A = scratch.allocate<Acc>(padded_states);
    B_constant = scratch.allocate<Acc>(p.B.per_step ? 0 : padded_states);
    C_constant = scratch.allocate<Acc>(p.C.per_step ? 0 : padded_states);
    // The first state is loaded as whole square tiles; the rows past dstate are overwritten afterwards.
    states = scratch.allocate<Acc>(p.chunk_length * states_per_step + padded_states);
    basis = scratch.allocate<Acc>(p.chunk_length * states_per_step);
    grad_B_lanes = scratch.allocate<Acc>((p.grad_B.per_step ? p.chunk_length : 1) * states_per_step);
    grad_C_lanes = scratch.allocate<Acc>((p.grad_C.per_step ? p.chunk_length : 1) * states_per_step);
    grad_A = scratch.allocate<Acc>(states_per_step);
  }
};

template <typename Acc>
void bound_rates(Acc* A, int64_t count) {
  constexpr Acc kLargest = kLargestRate<Acc>;
  for (int64_t i = 0; i < count; ++i) A[i] = std::clamp(A[i], -kLargest, kLargest);
}

// One chunk of one block. Inputs of the scan: A, u, delta, grad_y, B, C and the first of `states`. In and out: grad_state, and
// grad_A, grad_B_lanes and grad_C_lanes, to which the chunk adds. Outputs: y = <C, h>, grad_u, grad_delta.
template <typename Acc>
struct BwdChunk : BwdTiles<Acc> {
  int64_t steps, dstate;
  const Acc* grad_y;  // [step][lane]
  Operand<Acc> B, C;
  Acc *grad_state, *grad_previous;       // [state][lane]
  bool repeats_first;                    // whether the sample before the chunk is that of its first step
  int64_t grad_B_stride, grad_C_stride;  // of steps; 0 for one sum over the chunk
  int64_t live_lanes;
};

template <typename Acc, typename Method>
void scan_chunk_backward(const Method& method, const BwdChunk<Acc>& c) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  scan_chunk<Acc, Method, true>(method, {c.steps, c.dstate, c.A, c.u, c.delta, c.B, c.C, c.states, c.y, c.basis});
  const int64_t row = c.dstate * kLanes;
  const bool partial = c.live_lanes < kLanes;
  // Empty lanes may hold 0 * inf = NaN, which must not enter the sum over lanes.
  const auto live = [&](const V& value) { return partial ? V::set(V(Acc(0)), value, c.live_lanes) : value; };
  for (int64_t t = c.steps - 1; t >= 0; --t) {
    V delta = V::loadu(c.delta + t * kLanes);
    // An infinite step leaves these methods' states finite: its gradient is zero, not the NaN of zero times infinity.
    if constexpr (!Method::kInputHasDelta) delta = at::vec::minimum(delta, V(kLargestRate<Acc>));
    const V u = V::loadu(c.u + t * kLanes), dy = V::loadu(c.grad_y + t * kLanes);
    const V input = Method::kInputHasDelta ? delta * u : u;
    const Acc* before = c.states + t * row;
    const Acc* after = before + row;
    Acc* grad_B = c.grad_B_lanes + t * c.grad_B_stride;
    Acc* grad_C = c.grad_C_lanes + t * c.grad_C_stride;
    V sum_gB(Acc(0)), grad_delta(Acc(0)), grad_u(Acc(0));
    for (int64_t n = 0; n < c.dstate; ++n) {
      const int64_t at = n * kLanes;
      const V A = V::loadu(c.A + at), B = c.B.at(t, n);
      const V z = delta * A, basis = V::loadu(c.basis + t * row + at), gain = current_gain(method, z, basis);
      const auto derivative = method.derivatives(z, basis, gain);

      (V::loadu(grad_C + at) + live(dy * V::loadu(after + at))).store(grad_C + at);
      const V g = at::vec::fmadd(c.C.at(t, n), dy, V::loadu(c.grad_state + at));
      const V gB = g * B;
      const V grad_abar = g * V::loadu(before + at) * derivative.abar;
      V grad_z = grad_abar;  // dL/dz through Abar and, below, through k
      if constexpr (Method::kUnitGain) {
        (V::loadu(grad_B + at) + live(g * input)).store(grad_B + at);
        sum_gB = sum_gB + gB;
        grad_delta = at::vec::fmadd(grad_abar, A, grad_delta);
      } else {
        (V::loadu(grad_B + at) + live(g * (input * gain))).store(grad_B + at);
        grad_u = at::vec::fmadd(gB, gain, grad_u);
        sum_gB = at::vec::fmadd(gB, derivative.z_gain, sum_gB);
        grad_delta = at::vec::fmadd(grad_abar, A, grad_delta);
        grad_z = at::vec::fmadd(gB * input, derivative.gain, grad_z);
      }
      at::vec::fmadd(delta, grad_z, V::loadu(c.grad_A + at)).store(c.grad_A + at);
      (method.abar(z, basis) * g).store(c.grad_state + at);
    }
    if constexpr (Method::kUnitGain) grad_u = sum_gB;
    if constexpr (Method::kInputHasDelta) {
      grad_u = grad_u * delta;
      grad_delta = at::vec::fmadd(sum_gB, u, grad_delta);
    }
    grad_u.store(c.grad_u + t * kLanes);
    grad_delta.store(c.grad_delta + t * kLanes);
  }
}

// The same of the scan with two input samples a step, or with a step of its own for A. The gradient of a step's sample has a
// second part from the step after it, which grad_previous carries: in, that of the step after the chunk; out, that of the
// sample before the chunk.
template <typename Acc, typename Rule>
void scan_two_sample_chunk_backward(const Rule& rule, const BwdChunk<Acc>& c) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  constexpr bool kSeparate = kHasSeparateStep<Rule>;
  scan_two_sample_chunk<Acc, Rule, true>(rule, {c.steps, c.dstate, c.A, c.u, c.delta, c.B, c.C, c.states, c.y, c.basis}, c.lam,
                                         c.delta_A);
  const int64_t row = c.dstate * kLanes;
  const bool partial = c.live_lanes < kLanes;
  const auto live = [&](const V& value) { return partial ? V::set(V(Acc(0)), value, c.live_lanes) : value; };
  for (int64_t t = c.steps - 1; t >= 0; --t) {
    const auto method = method_at<Acc>(rule, c.lam, t);
    using Method = std::decay_t<decltype(method)>;
    const bool repeats = t == 0 && c.repeats_first;
    const V delta = V::loadu(c.delta + t * kLanes), dy = V::loadu(c.grad_y + t * kLanes);
    const V of_A = kSeparate ? V::loadu(c.delta_A + t * kLanes) : delta;
    const V scale = Method::kInputHasDelta ? delta : V(Acc(1));
    const V u = V::loadu(c.u + t * kLanes), u_before = V::loadu(c.u + (t - 1) * kLanes);
    const Acc* before = c.states + t * row;
    const Acc* after = before + row;
    Acc* grad_B = c.grad_B_lanes + t * c.grad_B_stride;
    Acc* grad_C = c.grad_C_lanes + t * c.grad_C_stride;
    V grad_delta(Acc(0)), grad_delta_A(Acc(0)), grad_u(Acc(0)), grad_lam(Acc(0));
    for (int64_t n = 0; n < c.dstate; ++n) {
      const int64_t at = n * kLanes;
      const V A = V::loadu(c.A + at), B = c.B.at(t, n), v = B * u;
      V v_before(Acc(0));
      if constexpr (Method::kUsesPreviousInput) v_before = c.B.at(t - 1, n) * u_before;
      const V z = delta * A, basis = V::loadu(c.basis + t * row + at);
      const auto gain = method.gain(z, basis);
      const auto derivative = method.derivatives(z, basis);

      (V::loadu(grad_C + at) + live(dy * V::loadu(after + at))).store(grad_C + at);
      const V g = at::vec::fmadd(c.C.at(t, n), dy, V::loadu(c.grad_state + at)), scaled = scale * g;
      V of_sample = scaled * gain.current;
      if constexpr (Method::kUsesPreviousInput) {
        of_sample = at::vec::fmadd(scaled, gain.current, V::loadu(c.grad_previous + at));
        V of_previous = scaled * gain.previous;
        if (repeats) {
          of_sample = of_sample + of_previous;
          of_previous = V(Acc(0));
        }
        of_previous.store(c.grad_previous + at);
      }
      (V::loadu(grad_B + at) + live(of_sample * u)).store(grad_B + at);
      grad_u = at::vec::fmadd(of_sample, B, grad_u);

      const V grad_abar = g * V::loadu(before + at) * derivative.abar;
      const V of_gains = at::vec::fmadd(derivative.z_gain, v, derivative.z_previous * v_before);
      grad_delta = at::vec::fmadd(g, of_gains, grad_delta);
      if constexpr (kSeparate) {
        const V of_s = at::vec::fmadd(scaled, derivative.previous * v_before, grad_abar);
        grad_delta_A = at::vec::fmadd(of_s, A, grad_delta_A);
        const V of_A_alone = at::vec::fmadd(of_A, of_s, V::loadu(c.grad_A + at));
        at::vec::fmadd(scale * scaled, derivative.gain * v, of_A_alone).store(c.grad_A + at);
      } else {
        grad_delta = at::vec::fmadd(grad_abar, A, grad_delta);
        const V of_z = at::vec::fmadd(derivative.gain, v, derivative.previous * v_before);
        at::vec::fmadd(delta, at::vec::fmadd(scaled, of_z, grad_abar), V::loadu(c.grad_A + at)).store(c.grad_A + at);
      }
      if constexpr (Rule::kHasLam) grad_lam = at::vec::fmadd(scaled, v - basis * v_before, grad_lam);
      (method.abar(z, basis) * g).store(c.grad_state + at);
    }
    grad_u.store(c.grad_u + t * kLanes);
    grad_delta.store(c.grad_delta + t * kLanes);
    if constexpr (Rule::kHasLam) grad_lam.store(c.grad_lam + t * kLanes);
    if constexpr (kSeparate) grad_delta_A.store(c.grad_delta_A + t * kLanes);
  }
}

// sums[step][state] = sum over lanes of values[step][state][lane].
template <typename Acc>
void sum_lanes(Acc* sums, int64_t row, const Acc* values, int64_t steps, int64_t dstate) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  alignas(64) Acc source[kLanes * kLanes];
  alignas(64) Acc square[kLanes * kLanes];
  for (int64_t t = 0; t < steps; ++t) {
    for (int64_t n = 0; n < dstate; n += kLanes) {
      const Acc* tile = values + (t * dstate + n) * kLanes;
      if (dstate - n < kLanes) {
        std::fill_n(source, kLanes * kLanes, Acc(0));
        std::copy_n(tile, (dstate - n) * kLanes, source);
        tile = source;
      }
      transpose_square(tile, kLanes, square, kLanes);
      V sum = V::loadu(square);
      for (int64_t lane = 1; lane < kLanes; ++lane) sum = sum + V::loadu(square + lane * kLanes);
      sum.store(sums + t * row + n);
    }
  }
}

// carried[block] += sums, [rows][lane]; nothing if carried is null.
template <typename Acc>
void add_to_block(void* carried, int64_t block, const Acc* sums, int64_t rows) {
  using V = Vec<Acc>;
  if (carried == nullptr) return;
  Acc* target = static_cast<Acc*>(carried) + block * rows * V::size();
  for (int64_t i = 0; i < rows * V::size(); i += V::size()) (V::loadu(target + i) + V::loadu(sums + i)).store(target + i);
}

template <typename Scalar>
void run_task(const SelectiveScanBwdParams& p, const Blocking& blocking, const BwdWorkspace& workspace, int64_t index,
              int64_t chunk, std::byte* memory) {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  Scratch scratch(memory);
  const BwdTiles<Acc> tiles(scratch, p, blocking);
  const Task task(p, blocking, index);
  const int64_t start = chunk * p.chunk_length, steps = std::min(p.chunk_length, task.steps() - start);
  if (steps <= 0) return;
  const int64_t row_in_pass = task.row_index - workspace.first_row;
  const int64_t row = p.dstate * kLanes;

  const TwoSampleParams* const two_samples = blocking.two_samples;
  if (p.B.per_step) load_samples_of_B<Acc, Scalar>(tiles.B_steps, p, blocking, task, start, steps);
  if (p.C.per_step) load_steps_of_C<Acc, Scalar>(tiles.C_steps, p, blocking, task, start, steps);
  if (p.grad_B.per_step) std::fill_n(tiles.grad_B_lanes, steps * row, Acc(0));
  if (p.grad_C.per_step) std::fill_n(tiles.grad_C_lanes, steps * row, Acc(0));

  for (int64_t block = 0; block < task.blocks; ++block) {
    const int64_t channel = task.first_channel + block * kLanes, channels = std::min(kLanes, task.end_channel - channel);
    const int64_t block_index = row_in_pass * blocking.blocks_per_row() + task.first_block + block;
    std::fill_n(tiles.grad_A, row, Acc(0));
    if (!p.grad_B.per_step) std::fill_n(tiles.grad_B_lanes, row, Acc(0));
    if (!p.grad_C.per_step) std::fill_n(tiles.grad_C_lanes, row, Acc(0));

    load_states(tiles.A, p.A.data, channel * p.A.stride_dim, p.A.stride_dim, p.A.stride_state, channels, p.dstate);
    bound_rates(tiles.A, p.dstate * Vec<Acc>::size());
    load_constant(tiles.B_constant, p.B, channel, channels, p.dstate);
    load_constant(tiles.C_constant, p.C, channel, channels, p.dstate);
    if (!p.C.per_step) conjugate_rows(tiles.C_constant, blocking, p.dstate);
    if (p.saves_chunk_state(task.row, chunk)) {
      const int64_t saved = (p.chunk_state(task.row, chunk) * p.dim + channel) * p.dstate;
      load_states(tiles.states, p.chunk_states, saved, p.dstate, 1, channels, p.dstate);
    } else if (p.initial_state.data != nullptr && task.row.initial >= 0) {
      const int64_t first = task.row.initial * p.initial_state.stride_batch + channel * p.initial_state.stride_dim;
      load_states(tiles.states, p.initial_state.data, first, p.initial_state.stride_dim, p.initial_state.stride_state, channels,
                  p.dstate);
    } else {
      std::fill_n(tiles.states, row, Acc(0));
    }

    load_samples_of_u<Acc, Scalar>(tiles.u, p, blocking, task.row, channel, channels, start, steps);
    load_lam<Acc, Scalar>(tiles.lam, blocking, task.row, channel, channels, start, steps);
    load_delta_A<Acc, Scalar>(tiles.delta_A, blocking, task.row, channel, channels, start, steps);
    load_sequence<Acc, Scalar>(tiles.raw_delta, p.delta, task.row, channel, channels, start, steps);
    finish_delta(tiles.raw_delta, tiles.delta, load_channels<Acc>(p.delta_bias, channel, channels), p.delta_softplus, steps);
    if (p.grad_out.data != nullptr) {
      load_sequence<Acc, Scalar>(tiles.grad_out, p.grad_out, task.row, channel, channels, start, steps);
    } else {
      std::fill_n(tiles.grad_out, steps * kLanes, Acc(0));
    }
    const Acc* dy = tiles.grad_out;
    if (p.z.data != nullptr) {
      load_sequence<Acc, Scalar>(tiles.z, p.z, task.row, channel, channels, start, steps);
      for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
        (V::loadu(tiles.grad_out + i) * silu(V::loadu(tiles.z + i))).store(tiles.dy + i);
      }
      dy = tiles.dy;
    }

    const BwdChunk<Acc> scanned{
        tiles,
        steps,
        p.dstate,
        dy,
        operand(p.B, tiles.B_steps, tiles.B_constant, blocking),
        operand(p.C, tiles.C_steps, tiles.C_constant, blocking),
        static_cast<Acc*>(workspace.grad_state) + block_index * row,
        two_samples != nullptr ? static_cast<Acc*>(workspace.grad_previous) + block_index * row : nullptr,
        start == 0 && repeats_first(blocking, task.row),
        p.grad_B.per_step ? row : 0,
        p.grad_C.per_step ? row : 0,
        channels};
    if (has_complex_states(blocking)) {
      visit_complex_rule(p.discretization, [&](auto rule) { scan_complex_chunk_backward<Acc, decltype(rule)>(rule, scanned); });
    } else if (two_samples != nullptr) {
      visit_rule(blocking, p.discretization,
                 [&](auto rule) { scan_two_sample_chunk_backward<Acc, decltype(rule)>(rule, scanned); });
    } else {
      visit_discretization(p.discretization, blocking.method,
                           [&](auto rule) { scan_chunk_backward<Acc, decltype(rule)>(rule, scanned); });
    }
    add_to_block(workspace.grad_A, block_index, tiles.grad_A, p.dstate);
    if (!p.B.per_step) add_to_block(workspace.grad_B, block_index, tiles.grad_B_lanes, p.dstate);
    if (!p.C.per_step) conjugate_rows(tiles.grad_C_lanes, blocking, p.dstate);
    if (!p.C.per_step) add_to_block(workspace.grad_C, block_index, tiles.grad_C_lanes, p.dstate);

    const V D = load_channels<Acc>(p.D, channel, channels);
    if (p.replaces_grad_out) {
      for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
        V y = V::loadu(tiles.y + i);
        if (p.D.data != nullptr) y = at::vec::fmadd(D, V::loadu(tiles.u + i), y);
        if (p.z.data != nullptr) y = y * silu(V::loadu(tiles.z + i));
        y.store(tiles.out + i);
      }
      store_sequence<Acc, Scalar>(p.grad_out, tiles.out, task.row, channel, channels, start, steps);
    }
    if (p.grad_z.data != nullptr) {
      for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
        const V z = V::loadu(tiles.z + i);
        const V y = at::vec::fmadd(D, V::loadu(tiles.u + i), V::loadu(tiles.y + i));
        (V::loadu(tiles.grad_out + i) * y * silu_derivative(z, sigmoid(z))).store(tiles.z + i);
      }
      store_sequence<Acc, Scalar>(p.grad_z, tiles.z, task.row, channel, channels, start, steps);
    }
    if (p.D.data != nullptr) {
      V grad_D(Acc(0));
      for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
        const V step_dy = V::loadu(dy + i);
        grad_D = at::vec::fmadd(step_dy, V::loadu(tiles.u + i), grad_D);
        at::vec::fmadd(D, step_dy, V::loadu(tiles.grad_u + i)).store(tiles.grad_u + i);
      }
      grad_D.store(tiles.y);
      add_to_block(workspace.grad_D, block_index, tiles.y, 1);
    }
    if (p.delta_softplus) {
      for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
        (V::loadu(tiles.grad_delta + i) * softplus_derivative(V::loadu(tiles.raw_delta + i))).store(tiles.grad_delta + i);
      }
    }
    if (p.delta_bias.data != nullptr) {
      V grad_delta_bias(Acc(0));
      for (int64_t i = 0; i < steps * kLanes; i += kLanes) grad_delta_bias = grad_delta_bias + V::loadu(tiles.grad_delta + i);
      grad_delta_bias.store(tiles.y);
      add_to_block(workspace.grad_delta_bias, block_index, tiles.y, 1);
    }
    if (two_samples != nullptr && two_samples->grad_lam.data != nullptr) {
      for (int64_t i = 0; two_samples->lam_sigmoid && i < steps * kLanes; i += kLanes) {
        const V lam = V::loadu(tiles.lam + i);
        (V::loadu(tiles.grad_lam + i) * lam * (V(Acc(1)) - lam)).store(tiles.grad_lam + i);
      }
      store_sequence<Acc, Scalar>(two_samples->grad_lam, tiles.grad_lam, task.row, channel, channels, start, steps);
    }
    if (two_samples != nullptr && two_samples->grad_delta_A.data != nullptr) {
      store_sequence<Acc, Scalar>(two_samples->grad_delta_A, tiles.grad_delta_A, task.row, channel, channels, start, steps);
    }
    if (p.grad_u.data != nullptr)
      store_sequence<Acc, Scalar>(p.grad_u, tiles.grad_u, task.row, channel, channels, start, steps);
    if (p.grad_delta.data != nullptr)
      store_sequence<Acc, Scalar>(p.grad_delta, tiles.grad_delta, task.row, channel, channels, start, steps);
  }

  const int64_t part = blocking.part_offset(index - workspace.first_row * blocking.tasks_per_row(), chunk);
  if (p.grad_B.per_step) {
    sum_lanes(static_cast<Acc*>(workspace.grad_B) + part, blocking.padded_dstate, tiles.grad_B_lanes, steps, p.dstate);
  }
  if (p.grad_C.per_step) {
    Acc* const sums = static_cast<Acc*>(workspace.grad_C) + part;
    sum_lanes(sums, blocking.padded_dstate, tiles.grad_C_lanes, steps, p.dstate);
    conjugate_steps(sums, blocking, steps);
  }
}

// Adds the tasks of each group, in order, and stores steps [start, start + steps) of the gradient.
template <typename Acc, typename Scalar>
void reduce_matrix(const MatrixView& grad, const void* parts, const SelectiveScanBwdParams& p, const Blocking& blocking,
                   const ScanRow& row, int64_t row_in_pass, int64_t chunk, Acc* sums) {
  using V = Vec<Acc>;
  const int64_t start = chunk * p.chunk_length, steps = std::min(p.chunk_length, row.end - row.begin - start);
  if (steps <= 0) return;
  const int64_t size = steps * blocking.padded_dstate, next_task = blocking.chunks_per_sweep * blocking.part_size();
  const int64_t tasks = blocking.tasks_per_row() / grad.groups;
  for (int64_t group = 0; group < grad.groups; ++group) {
    const int64_t first_task = row_in_pass * blocking.tasks_per_row() + group * tasks;
    const Acc* part = static_cast<const Acc*>(parts) + blocking.part_offset(first_task, chunk);
    for (int64_t i = 0; i < size; i += V::size()) {
      V sum(Acc(0));  // the result if there are no channels
      for (int64_t task = 0; task < tasks; ++task) sum = sum + V::loadu(part + task * next_task + i);
      sum.store(sums + i);
    }
    Scalar* target = static_cast<Scalar*>(grad.data) + row.batch * grad.stride_batch + group * grad.stride_channel +
                     (row.begin + start) * grad.stride_step;
    store_tile<Acc>(target, grad.stride_state, grad.stride_step, sums, blocking.padded_dstate, p.dstate, steps);
  }
}

template <typename Acc>
Acc* reduce_tile(Scratch& scratch, const Blocking& blocking) {
  return scratch.allocate<Acc>(blocking.part_size());
}

}  // namespace

int64_t bwd_scratch_bytes(const SelectiveScanBwdParams& p, const Blocking& blocking, ScalarKind kind) {
  int64_t bytes = 0;
  visit_scalar(kind, [&](auto scalar) {
    using Acc = AccumulateType<decltype(scalar)>;
    Scratch for_task(nullptr), for_reduce(nullptr);
    BwdTiles<Acc>(for_task, p, blocking);
    reduce_tile<Acc>(for_reduce, blocking);
    bytes = std::max(for_task.used(), for_reduce.used());
  });
  return bytes;
}

void bwd_task(const SelectiveScanBwdParams& p, const Blocking& blocking, const BwdWorkspace& workspace, ScalarKind kind,
              int64_t task, int64_t chunk, std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) { run_task<decltype(scalar)>(p, blocking, workspace, task, chunk, scratch); });
}

void bwd_reduce(const SelectiveScanBwdParams& p, const Blocking& blocking, const BwdWorkspace& workspace, ScalarKind kind,
                int64_t row_index, int64_t chunk, std::byte* memory) {
  const ScanRow row = p.row(row_index);
  const int64_t in_pass = row_index - workspace.first_row;
  visit_scalar(kind, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Acc = AccumulateType<Scalar>;
    Scratch scratch(memory);
    Acc* sums = reduce_tile<Acc>(scratch, blocking);
    const auto reduce = [&](const MatrixView& grad, const void* parts) {
      if (!grad.per_step) return;
      if (has_complex_states(blocking)) return reduce_matrix<Acc, Acc>(grad, parts, p, blocking, row, in_pass, chunk, sums);
      reduce_matrix<Acc, Scalar>(grad, parts, p, blocking, row, in_pass, chunk, sums);
    };
    reduce(p.grad_B, workspace.grad_B);
    reduce(p.grad_C, workspace.grad_C);
  });
}

// fwd_kernel.cpp defines these.
int64_t vector_bytes();
int64_t fwd_scratch_bytes(const SelectiveScanParams&, const Blocking&, ScalarKind);
void fwd_task(const SelectiveScanFwdParams&, const Blocking&, ScalarKind, int64_t, std::byte*);

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&vector_bytes, &fwd_scratch_bytes, &bwd_scratch_bytes,
                                       &fwd_task,     &bwd_task,          &bwd_reduce};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan
