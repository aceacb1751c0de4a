// One chunk of one block of the scan with two input samples a step, forward and backward (common/two_sample_discretization.h),
// or with a step of its own for A (common/separate_step.h). The rows of u and, if it is per step, of B begin with that of the
// sample before the chunk, at index -1.
#pragma once

#include <type_traits>

#include "common/separate_step.h"
#include "selective_scan/cpu/kernel.h"

namespace ssm_kernels::selective_scan {
inline namespace CPU_CAPABILITY {

inline bool has_lam(const Blocking& blocking) {
  return blocking.two_samples != nullptr && blocking.two_samples->lam.data != nullptr;
}

inline bool has_delta_A(const Blocking& blocking) {
  return blocking.two_samples != nullptr && blocking.two_samples->delta_A.data != nullptr;
}

inline bool has_complex_states(const Blocking& blocking) {
  return blocking.two_samples != nullptr && blocking.two_samples->is_complex;
}

// Whether the sample before the first step of a row is that of the step.
inline bool repeats_first(const Blocking& blocking, const ScanRow& row) {
  const TwoSampleParams* const two_samples = blocking.two_samples;
  return two_samples != nullptr && two_samples->repeats_first && (two_samples->previous_u.data == nullptr || row.initial < 0);
}

// A tile of a chunk's steps, which may have rows before its first one.
template <typename Acc>
Acc* rows_of_samples(Scratch& scratch, const Blocking& blocking, int64_t row) {
  const int64_t before = blocking.rows_before();
  return scratch.allocate<Acc>((blocking.chunk_length + before) * row) + (before > 0 ? row : 0);
}

// Sets the row before a row's first step: to values of `given` from `offset` on, to the first step, or to zero.
template <typename Acc, typename Scalar>
void load_previous(Acc* first, int64_t row, const Blocking& blocking, const ScanRow& of, const StateView& given, int64_t offset,
                   int64_t stride, int64_t count) {
  Acc* const before = first - row;
  if (repeats_first(blocking, of)) {
    std::copy_n(first, row, before);
    return;
  }
  std::fill_n(before, row, Acc(0));
  if (given.data == nullptr || of.initial < 0) return;
  const Scalar* const source = static_cast<const Scalar*>(given.data) + of.initial * given.stride_batch + offset;
  for (int64_t i = 0; i < count; ++i) before[i] = static_cast<Acc>(source[i * stride]);
}

// As load_sequence and load_matrix_steps; with the sample before the chunk if the method reads it.
template <typename Acc, typename Scalar>
void load_samples_of_u(Acc* tile, const SelectiveScanParams& p, const Blocking& blocking, const ScanRow& row, int64_t channel,
                       int64_t channels, int64_t start, int64_t steps) {
  constexpr int64_t kLanes = Vec<Acc>::size();
  const int64_t before = blocking.two_samples != nullptr && start > 0 ? 1 : 0;
  load_sequence<Acc, Scalar>(tile - before * kLanes, p.u, row, channel, channels, start - before, steps + before);
  if (blocking.two_samples == nullptr || start > 0) return;
  const StateView& given = blocking.two_samples->previous_u;
  load_previous<Acc, Scalar>(tile, kLanes, blocking, row, given, channel * given.stride_dim, given.stride_dim, channels);
}
template <typename Acc, typename Scalar>
void load_samples_of_B(Acc* tile, const SelectiveScanParams& p, const Blocking& blocking, const Task& task, int64_t start,
                       int64_t steps) {
  if constexpr (!std::is_same_v<Acc, Scalar>) {
    if (has_complex_states(blocking)) return load_samples_of_B<Acc, Acc>(tile, p, blocking, task, start, steps);
  }
  const int64_t before = blocking.two_samples != nullptr && start > 0 ? 1 : 0;
  load_matrix_steps<Acc, Scalar>(tile - before * blocking.padded_dstate, p.B, p, blocking, task, start - before,
                                 steps + before);
  if (blocking.two_samples == nullptr || start > 0) return;
  const StateView& given = blocking.two_samples->previous_B;
  const int64_t group = task.first_channel / (p.dim / p.B.groups);
  load_previous<Acc, Scalar>(tile, blocking.padded_dstate, blocking, task.row, given, group * given.stride_dim,
                             given.stride_state, p.dstate);
}

// Multiplies pairs of rows by weight and -weight: C becomes weight conj(C), and the gradient of that becomes the gradient of C.
template <typename Acc>
void conjugate_rows(Acc* tile, const Blocking& blocking, int64_t states) {
  using V = Vec<Acc>;
  if (!has_complex_states(blocking)) return;
  const Acc weight = blocking.two_samples->conjugate_pairs ? Acc(2) : Acc(1);
  for (int64_t n = 0; n < states; ++n) {
    Acc* const row = tile + n * V::size();
    (V::loadu(row) * V(n % 2 == 0 ? weight : -weight)).store(row);
  }
}
// The same of [step][padded state], a number each.
template <typename Acc>
void conjugate_steps(Acc* tile, const Blocking& blocking, int64_t steps) {
  if (!has_complex_states(blocking)) return;
  const Acc weight = blocking.two_samples->conjugate_pairs ? Acc(2) : Acc(1);
  for (int64_t i = 0; i < steps * blocking.padded_dstate; i += 2) {
    tile[i] *= weight;
    tile[i + 1] *= -weight;
  }
}

// As load_matrix_steps; of complex states, weight conj(C).
template <typename Acc, typename Scalar>
void load_steps_of_C(Acc* tile, const SelectiveScanParams& p, const Blocking& blocking, const Task& task, int64_t start,
                     int64_t steps) {
  if (!has_complex_states(blocking)) return load_matrix_steps<Acc, Scalar>(tile, p.C, p, blocking, task, start, steps);
  load_matrix_steps<Acc, Acc>(tile, p.C, p, blocking, task, start, steps);
  conjugate_steps(tile, blocking, steps);
}

// The weights of exp_trapezoidal; nothing for other methods.
template <typename Acc, typename Scalar>
void load_lam(Acc* tile, const Blocking& blocking, const ScanRow& row, int64_t channel, int64_t channels, int64_t start,
              int64_t steps) {
  using V = Vec<Acc>;
  if (!has_lam(blocking)) return;
  load_sequence<Acc, Scalar>(tile, blocking.two_samples->lam, row, channel, channels, start, steps);
  for (int64_t i = 0; blocking.two_samples->lam_sigmoid && i < steps * V::size(); i += V::size()) {
    sigmoid(V::loadu(tile + i)).store(tile + i);
  }
}

// The steps of A; nothing without them. An infinite one is the largest number, so that a rate of zero keeps the state.
template <typename Acc, typename Scalar>
void load_delta_A(Acc* tile, const Blocking& blocking, const ScanRow& row, int64_t channel, int64_t channels, int64_t start,
                  int64_t steps) {
  using V = Vec<Acc>;
  if (!has_delta_A(blocking)) return;
  load_sequence<Acc, Scalar>(tile, blocking.two_samples->delta_A, row, channel, channels, start, steps);
  const V largest(kLargestRate<Acc>);
  for (int64_t i = 0; i < steps * V::size(); i += V::size()) {
    at::vec::minimum(V::loadu(tile + i), largest).store(tile + i);
  }
}

// Calls visitor(rule) with the rule of a call: SeparateStep<> of it if A has steps of its own.
template <typename Visitor>
void visit_rule(const Blocking& blocking, Discretization discretization, const Visitor& visitor) {
  if (has_delta_A(blocking)) return visit_separate_step(discretization, visitor);
  visit_two_sample_discretization(discretization, blocking.method, visitor);
}

// The method of each step. `lam` is [step][lane], read if the rule has it.
template <typename Acc, typename Rule>
auto method_at(const Rule& rule, const Acc* lam, int64_t step) {
  using V = Vec<Acc>;
  return rule.step(Rule::kHasLam ? V::loadu(lam + step * V::size()) : V(Acc(0)));
}

// As scan_chunk. `delta_A` is [step][lane], read if the rule has separate steps.
template <typename Acc, typename Rule, bool keeps>
void scan_two_sample_chunk(const Rule& rule, const ScanChunk<Acc>& c, const Acc* lam, const Acc* delta_A) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  const int64_t row = c.dstate * kLanes;
  for (int64_t t = 0; t < c.steps; ++t) {
    const auto method = method_at<Acc>(rule, lam, t);
    using Method = std::decay_t<decltype(method)>;
    const V delta = V::loadu(c.delta + t * kLanes), of_A = kHasSeparateStep<Rule> ? V::loadu(delta_A + t * kLanes) : delta;
    const V scale = Method::kInputHasDelta ? delta : V(Acc(1));
    const V input = scale * V::loadu(c.u + t * kLanes), input_before = scale * V::loadu(c.u + (t - 1) * kLanes);
    const Acc* const before = c.state + (keeps ? t * row : 0);
    Acc* const after = c.state + (keeps ? (t + 1) * row : 0);
    V y(Acc(0));
    for (int64_t n = 0; n < c.dstate; ++n) {
      const V A = V::loadu(c.A + n * kLanes), z = delta * A;
      const V basis = method.basis(of_A * A);
      if constexpr (keeps) basis.store(c.basis + t * row + n * kLanes);
      const auto gain = method.gain(z, basis);
      V inputs = input * gain.current * c.B.at(t, n);
      if constexpr (Method::kUsesPreviousInput) {
        inputs = at::vec::fmadd(input * gain.current, c.B.at(t, n), input_before * gain.previous * c.B.at(t - 1, n));
      }
      const V h = at::vec::fmadd(method.abar(z, basis), V::loadu(before + n * kLanes), inputs);
      h.store(after + n * kLanes);
      y = at::vec::fmadd(h, c.C.at(t, n), y);
    }
    y.store(c.y + t * kLanes);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan
