// One chunk of one block of the scan of complex states, forward and backward. A pair of neighboring rows of a [state][lane]
// tile is the real and the imaginary part of a state (common/complex.h). The tile of C holds weight conj(C), so that outputs
// and adjoints are those of real states: <C, h> is weight Re(sum C h).
#pragma once

#include "common/complex.h"
#include "selective_scan/cpu/two_sample_kernel.h"

namespace ssm_kernels::selective_scan {
inline namespace CPU_CAPABILITY {

template <typename Acc>
Complex<Vec<Acc>> load_pair(const Acc* row) {
  return {Vec<Acc>::loadu(row), Vec<Acc>::loadu(row + Vec<Acc>::size())};
}
template <typename Acc>
void store_pair(Acc* row, const Complex<Vec<Acc>>& value) {
  value.re.store(row);
  value.im.store(row + Vec<Acc>::size());
}
template <typename Acc>
Complex<Vec<Acc>> pair_at(const Operand<Acc>& operand, int64_t step, int64_t state) {
  return {operand.at(step, state), operand.at(step, state + 1)};
}

// The method of each step.
template <typename Acc, typename Rule>
auto complex_method_at(const Rule& rule, const Acc* lam, int64_t step) {
  using V = Vec<Acc>;
  return rule.step(Complex<V>(Rule::kHasLam ? V::loadu(lam + step * V::size()) : V(Acc(0)), V(Acc(0))));
}

// As scan_two_sample_chunk.
template <typename Acc, typename Rule, bool keeps>
void scan_complex_chunk(const Rule& rule, const ScanChunk<Acc>& c, const Acc* lam) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  const int64_t row = c.dstate * kLanes;
  for (int64_t t = 0; t < c.steps; ++t) {
    const auto method = complex_method_at<Acc>(rule, lam, t);
    using Method = std::decay_t<decltype(method)>;
    const V delta = V::loadu(c.delta + t * kLanes);
    const V input = delta * V::loadu(c.u + t * kLanes), input_before = delta * V::loadu(c.u + (t - 1) * kLanes);
    const Acc* const before = c.state + (keeps ? t * row : 0);
    Acc* const after = c.state + (keeps ? (t + 1) * row : 0);
    V y(Acc(0));
    for (int64_t n = 0; n < c.dstate; n += 2) {
      const int64_t at = n * kLanes;
      const Complex<V> A = load_pair(c.A + at), z = scaled(delta, A);
      const Complex<V> basis = complex_basis(method, delta, z, ComplexRate<V>(A.re, A.im));
      if constexpr (keeps) store_pair(c.basis + t * row + at, basis);
      Complex<V> inputs = scaled(input, pair_at(c.B, t, n));
      if constexpr (Method::kUsesPreviousInput) {
        const auto gain = method.gain(z, basis);
        inputs = multiply_add(gain.previous, scaled(input_before, pair_at(c.B, t - 1, n)), gain.current * inputs);
      } else if constexpr (!Method::kUnitGain) {
        inputs = method.gain(z, basis).current * inputs;
      }
      const Complex<V> h = multiply_add(method.abar(z, basis), load_pair(before + at), inputs);
      store_pair(after + at, h);
      y = dot_add(h, pair_at(c.C, t, n), y);
    }
    y.store(c.y + t * kLanes);
  }
}

// As scan_two_sample_chunk_backward. `Chunk` is that of bwd_kernel.cpp.
template <typename Acc, typename Rule, typename Chunk>
void scan_complex_chunk_backward(const Rule& rule, const Chunk& c) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  scan_complex_chunk<Acc, Rule, true>(rule, {c.steps, c.dstate, c.A, c.u, c.delta, c.B, c.C, c.states, c.y, c.basis}, c.lam);
  const int64_t row = c.dstate * kLanes;
  const bool partial = c.live_lanes < kLanes;
  const auto add_live = [&](Acc* sums, const Complex<V>& value) {
    const auto live = [&](const V& part) { return partial ? V::set(V(Acc(0)), part, c.live_lanes) : part; };
    store_pair(sums, load_pair(sums) + Complex<V>(live(value.re), live(value.im)));
  };
  for (int64_t t = c.steps - 1; t >= 0; --t) {
    const auto method = complex_method_at<Acc>(rule, c.lam, t);
    using Method = std::decay_t<decltype(method)>;
    const bool repeats = t == 0 && c.repeats_first;
    const V delta = V::loadu(c.delta + t * kLanes), dy = V::loadu(c.grad_y + t * kLanes);
    const V u = V::loadu(c.u + t * kLanes), u_before = V::loadu(c.u + (t - 1) * kLanes);
    const Acc* before = c.states + t * row;
    const Acc* after = before + row;
    Acc* grad_B = c.grad_B_lanes + t * c.grad_B_stride;
    Acc* grad_C = c.grad_C_lanes + t * c.grad_C_stride;
    V grad_delta(Acc(0)), grad_u(Acc(0)), grad_lam(Acc(0));
    for (int64_t n = 0; n < c.dstate; n += 2) {
      const int64_t at = n * kLanes;
      const Complex<V> A = load_pair(c.A + at), z = scaled(delta, A), basis = load_pair(c.basis + t * row + at);
      const Complex<V> B = pair_at(c.B, t, n), v = scaled(u, B);
      Complex<V> v_before(Acc(0));
      if constexpr (Method::kUsesPreviousInput) v_before = scaled(u_before, pair_at(c.B, t - 1, n));
      const auto gain = method.gain(z, basis);
      const auto derivative = method.derivatives(z, basis);

      add_live(grad_C + at, scaled(dy, load_pair(after + at)));
      const Complex<V> g = load_pair(c.grad_state + at) + scaled(dy, pair_at(c.C, t, n)), of_delta = scaled(delta, g);
      Complex<V> of_sample = conjugate_times(gain.current, of_delta);
      if constexpr (Method::kUsesPreviousInput) {
        of_sample = of_sample + load_pair(c.grad_previous + at);
        Complex<V> of_previous = conjugate_times(gain.previous, of_delta);
        if (repeats) {
          of_sample = of_sample + of_previous;
          of_previous = Complex<V>(Acc(0));
        }
        store_pair(c.grad_previous + at, of_previous);
      }
      add_live(grad_B + at, scaled(u, of_sample));
      grad_u = dot_add(of_sample, B, grad_u);

      // dh/dz without the factor delta of the inputs, and dh/d delta.
      const Complex<V> of_state = derivative.abar * load_pair(before + at);
      Complex<V> of_inputs = derivative.gain * v, direct = derivative.z_gain * v;
      if constexpr (Method::kUsesPreviousInput) {
        of_inputs = multiply_add(derivative.previous, v_before, of_inputs);
        direct = multiply_add(derivative.z_previous, v_before, direct);
      }
      const Complex<V> of_z = of_state + scaled(delta, of_inputs);
      grad_delta = dot_add(multiply_add(A, of_state, direct), g, grad_delta);
      store_pair(c.grad_A + at, conjugate_times_add(of_z, of_delta, load_pair(c.grad_A + at)));
      if constexpr (Rule::kHasLam) grad_lam = dot_add(v - basis * v_before, of_delta, grad_lam);
      store_pair(c.grad_state + at, conjugate_times(method.abar(z, basis), g));
    }
    grad_u.store(c.grad_u + t * kLanes);
    grad_delta.store(c.grad_delta + t * kLanes);
    if constexpr (Rule::kHasLam) grad_lam.store(c.grad_lam + t * kLanes);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan
