// The gates of a scan that reads two input samples a step, and their adjoint.
//
// With zeta = d A, d the step size, k and m the factors of the rule, and U_t = x_t B_t^T, such a rule is
//
//   S_t = e^zeta_t S_{t-1} + k_t d_t U_t + m_t d_t U_{t-1},      y_t = S_t C_t
//
// U_t enters S_t and S_{t+1}. With P_t the state that step t + 1 reads before its own input,
//
//   P_t = e^zeta_{t+1} S_t + m_{t+1} d_{t+1} U_t = e^zeta_{t+1} P_{t-1} + w_t U_t
//   w_t = e^zeta_{t+1} k_t d_t + m_{t+1} d_{t+1},      y_t = P_{t-1} C_t + k_t d_t (B_t . C_t) x_t
//
// This is the chunked scan with the log decays zeta_{t+1}, the gains w_t and the diagonal gains k_t d_t
// (Inputs::diagonal_gain). No weight is divided by a decay. After the last step of a sequence zeta_{t+1} = 0 and m_{t+1} = 0,
// so that the last P is the last state. The scan starts from P_0 = e^zeta_1 S_0 + m_1 d_1 U_0, with U_0 the sample before the
// sequence. If the first sample repeats, U_0 = U_1, and m_1 is added to k_1 instead.
#pragma once

#include <ATen/core/Tensor.h>

#include "ssd/aten/step_sizes.h"
#include "ssd/two_sample_op.h"

namespace ssm_kernels::ssd {

// The kernels of CUDA (ssd/cuda/two_sample_gates.h) make the three gates and evaluate the steps again in the adjoint: then only
// what belongs to the first states is kept.
struct TwoSampleGates {
  at::Tensor log_decay, gain, diagonal_gain;  // (batch, seqlen, heads), accumulation type
  // Zeta and m d of the first step of each sequence, (sequences, heads), float64. Undefined if the scan starts from zero.
  at::Tensor first_zeta, first_previous;

  // (batch, seqlen, ...), float64: what the adjoint reads. Undefined if kernels made the gates.
  Steps steps;
  at::Tensor zeta, current, previous, lam;  // current and previous: k d, without a repeated sample, and m d
  at::Tensor next_decay;                    // e^zeta of the next step
  at::Tensor is_last;                       // whether a step is the last of its sequence, (batch, seqlen, 1)
  at::Tensor is_repeated;                   // whether a step's sample is also the one before it; undefined if none is
  // With cu_seqlens and first states, of kernels too.
  at::Tensor first_steps;  // (sequences,), where each sequence begins in the scan's order; with cu_seqlens
  at::Tensor has_steps;    // (sequences, 1), bool; with cu_seqlens

  at::Tensor with_repeated() const;  // k d, and m d of a repeated sample
};

// Whether a scan starts from states that are not zero.
inline bool has_first_states(const TwoSampleInputs& in) { return is_present(in.initial_states) || is_present(in.previous_x); }

// Whether each step has an A, in place of each head.
inline bool has_A_of_steps(const TwoSampleInputs& in) { return in.A.dim() > 1; }

TwoSampleGates make_two_sample_gates(const TwoSampleInputs& in, Discretization method);

// P_0, (sequences, heads, headdim, dstate), of a call that has_first_states().
at::Tensor first_states(const TwoSampleInputs& in, const TwoSampleGates& gates);

// The gradients of dt, A, dt_bias, lam, initial_states, previous_x and previous_B, where they have elements.
// grad_gates: of log_decay, gain and diagonal_gain. grad_first_states: of first_states(), undefined if there are none.
struct GateGrads {
  at::Tensor log_decay, gain, diagonal_gain;
};
// Whether sequences begin at the steps in the order of the scan, (batch, seqlen), bool; seq_idx counts if with_resets.
at::Tensor starts_in_scan_order(const TwoSampleInputs& in, bool with_resets);
// For CUDA tensors of the dtypes that have kernels: write the gates, and the gradients of dt, A, dt_bias and lam.
// grad_first: the gradients of zeta and m d of the first steps, (sequences, heads), undefined if the scan starts from zero.
struct FirstStepGrads {
  at::Tensor zeta, previous;
};
bool has_gate_kernels(const TwoSampleInputs& in);
void two_sample_gates_cuda(const TwoSampleInputs& in, Discretization method, TwoSampleGates& gates);
void two_sample_gates_adjoint_cuda(const TwoSampleInputs& in, Discretization method, const TwoSampleGates& gates,
                                   const GateGrads& grad_gates, const FirstStepGrads& grad_first, const TwoSampleGrads& grads);

void two_sample_gates_adjoint(const TwoSampleInputs& in, Discretization method, const TwoSampleGates& gates,
                              const GateGrads& grad_gates, const at::Tensor& grad_first_states, const TwoSampleGrads& grads);

}  // namespace ssm_kernels::ssd
