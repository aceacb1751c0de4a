// Mamba-3's rotation on the CPU: k and q of each head from B and C, and the adjoint. This file is compiled once per instruction
// set.
//
// A step adds the bias of the head to its group's row and rotates the row's pairs by the head's phases,
//
//   theta_t = theta_{t-1} + pi rate_t d_t       k_t = R(theta_t) (B_t + B_bias)       q_t = R(theta_t) (C_t + C_bias)
//
// and all ranks of a step have its phases. A thread takes all steps of a head of a sequence, one after another. Phases are
// float64 and in turns, theta / 2 pi, and each step reduces them to half a turn around zero, so that their error grows with the
// rounding of a number below 1 and not with the sum of all steps.
//
// The gradient of a phase is the sum over all k and q of the step of first * grad second - second * grad first of the rotated
// pair, and that of what a step adds to the phase is the sum of the gradients of its own and all later phases of the sequence.

#include <algorithm>
#include <cmath>

#include "cpu/scalar_types.h"
#include "mamba3/cpu/rotation_kernels.h"
#include "mamba3/cpu/rotations.h"

namespace ssm_kernels::mamba3 {
inline namespace CPU_CAPABILITY {
namespace {

// Adds the gradients of the phases of a rotated row.
template <typename T>
inline void add_phase_grads(const RotationParams& p, const T* row, const T* grad, T* sums) {
  const int64_t step = p.is_pairs ? 2 : 1, other = p.is_pairs ? 1 : p.dstate / 2;
#pragma omp simd
  for (int64_t i = 0; i < p.angles; ++i) {
    sums[i] += row[step * i] * grad[step * i + other] - row[step * i + other] * grad[step * i];
  }
}

// The steps of a sequence, and the row of the batch that has them.
struct Span {
  int64_t row, begin, end;
  Span(const RotationParams& p, int64_t sequence)
      : row(p.cu_seqlens == nullptr ? sequence : 0),
        begin(p.cu_seqlens == nullptr ? 0 : p.cu_seqlens[sequence]),
        end(p.cu_seqlens == nullptr ? p.seqlen : p.cu_seqlens[sequence + 1]) {}
};

struct Step {
  int64_t at;           // among (batch, seqlen, heads)
  const double* rates;  // of its angles
  Step(const RotationParams& p, const Span& span, int64_t t, int64_t head)
      : at((span.row * p.seqlen + t) * p.heads + head),
        rates(p.rates + (p.has_angles_of_heads ? at : span.row * p.seqlen + t) * p.angles) {}

  // Among (batch, seqlen, ranks, heads).
  int64_t row(const RotationParams& p, int64_t rank, int64_t head) const {
    return (at - head) * p.ranks + rank * p.heads + head;
  }
};

bool begins(const RotationParams& p, const Span& span, int64_t t) {
  return t > span.begin && p.resets != nullptr && p.resets[span.row * p.seqlen + t] != 0;
}

template <typename Scalar>
void rotate(const RotationParams& p, int64_t sequence, int64_t head, void* scratch) {
  using T = AccumulateType<Scalar>;
  double* const phases = static_cast<double*>(scratch);
  T *const c = reinterpret_cast<T*>(phases + p.angles), *const s = c + p.angles, *const biased = s + p.angles;
  double* const state = p.phases + (sequence * p.heads + head) * p.angles;
  std::copy(state, state + p.angles, phases);
  const Pairs pairs{p.is_pairs, p.angles, p.dstate};
  const Span span(p, sequence);
  const int64_t group = head / (p.heads / p.groups);
  const auto rotate_one = [&](const RowView& view, const void* bias, void* out, int64_t t, int64_t rank, int64_t at) {
    const Scalar* const row = static_cast<const Scalar*>(view.data) + span.row * view.stride_batch + t * view.stride_step +
                              rank * view.stride_rank + group * view.stride_group;
    const T* const of_head = bias == nullptr ? nullptr : static_cast<const T*>(bias) + (rank * p.heads + head) * p.dstate;
    for (int64_t n = 0; n < p.dstate; ++n) biased[n] = static_cast<T>(row[n]) + (of_head == nullptr ? T(0) : of_head[n]);
    rotate_row(pairs, biased, static_cast<T*>(out) + at * p.dstate, c, s, T(1));
  };
  for (int64_t t = span.begin; t < span.end; ++t) {
    const Step step(p, span, t, head);
    if (begins(p, span, t)) std::fill(phases, phases + p.angles, 0.0);
    const double half = 0.5 * p.sizes[step.at];
    T* const turns = static_cast<T*>(p.turns) + step.at * p.angles;
#pragma omp simd
    for (int64_t i = 0; i < p.angles; ++i) {
      const double phase = phases[i] + step.rates[i] * half;
      phases[i] = phase - std::rint(phase);
      turns[i] = static_cast<T>(phases[i]);
    }
    cosines_and_sines(phases, c, s, p.angles);
    for (int64_t rank = 0; rank < p.ranks; ++rank) {
      rotate_one(p.B, p.B_bias, p.k, t, rank, step.row(p, rank, head));
      rotate_one(p.C, p.C_bias, p.q, t, rank, step.row(p, rank, head));
    }
  }
  std::copy(phases, phases + p.angles, state);
}

template <typename T>
void unrotate(const RotationParams& p, int64_t sequence, int64_t head, void* scratch) {
  double* const sums = static_cast<double*>(scratch);
  T *const c = reinterpret_cast<T*>(sums + p.angles), *const s = c + p.angles, *const row = s + p.angles;
  double* const state = p.phases + (sequence * p.heads + head) * p.angles;
  std::copy(state, state + p.angles, sums);
  const Pairs pairs{p.is_pairs, p.angles, p.dstate};
  const Span span(p, sequence);
  for (int64_t t = span.end; t-- > span.begin;) {
    const Step step(p, span, t, head);
    T* const turns = static_cast<T*>(p.turns) + step.at * p.angles;
    cosines_and_sines(turns, c, s, p.angles);
    T* const of_phases = row;  // p.angles <= p.dstate / 2
    std::fill(of_phases, of_phases + p.angles, T(0));
    for (int64_t rank = 0; rank < p.ranks; ++rank) {
      const int64_t offset = step.row(p, rank, head) * p.dstate;
      add_phase_grads(p, static_cast<const T*>(p.k) + offset, static_cast<const T*>(p.grad_k) + offset, of_phases);
      add_phase_grads(p, static_cast<const T*>(p.q) + offset, static_cast<const T*>(p.grad_q) + offset, of_phases);
    }
    for (int64_t i = 0; i < p.angles; ++i) {
      sums[i] += static_cast<double>(of_phases[i]);
      turns[i] = static_cast<T>(sums[i]);
    }
    if (begins(p, span, t)) std::fill(sums, sums + p.angles, 0.0);
    for (int64_t rank = 0; rank < p.ranks; ++rank) {
      for (void* const grads : {p.grad_k, p.grad_q}) {
        T* const grad = static_cast<T*>(grads) + step.row(p, rank, head) * p.dstate;
        std::copy(grad, grad + p.dstate, row);
        rotate_row(pairs, row, grad, c, s, T(-1));
      }
    }
  }
  std::copy(sums, sums + p.angles, state);
}

}  // namespace

void rotate_head(const RotationParams& p, int64_t sequence, int64_t head, void* scratch) {
  visit_scalar(p.input_kind, [&](auto scalar) { rotate<decltype(scalar)>(p, sequence, head, scratch); });
}

void unrotate_head(const RotationParams& p, int64_t sequence, int64_t head, void* scratch) {
  visit_scalar(p.input_kind, [&](auto scalar) { unrotate<AccumulateType<decltype(scalar)>>(p, sequence, head, scratch); });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&rotate_head, &unrotate_head};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::mamba3
