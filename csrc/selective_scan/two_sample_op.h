// Shared by the dispatcher's side of selective_scan_two_sample (two_sample_op.cpp), the selective scan with a discretization
// that reads two input samples a step or with a step of its own for A, and its devices. What it shares with
// selective_scan is in selective_scan_op.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>

#include "selective_scan/selective_scan_op.h"

namespace ssm_kernels::selective_scan {

// initial_state is an argument of backward for packed calls only: the first of chunk_states is that of others.
struct TwoSampleInputs : Inputs {
  OptionalTensor lam, previous_u, previous_B, delta_A;
  bool lam_sigmoid = false, repeats_first = false, conjugate_pairs = true;

  auto tensors() { return std::tuple_cat(fields_but_state(), std::tie(initial_state, lam, previous_u, previous_B, delta_A)); }
  auto options() {
    return std::tie(discretization, lam_sigmoid, repeats_first, delta_softplus, reverse, is_complex, conjugate_pairs);
  }
  auto fields() { return std::tuple_cat(tensors(), std::tie(seq_idx, cu_seqlens), options()); }
};

struct TwoSampleFwdInputs : TwoSampleInputs {
  auto fields() { return std::tuple_cat(TwoSampleInputs::fields(), std::tie(save_chunk_states)); }
};

// In the order of backward's results: those of Grad, and these.
enum TwoSampleGrad { kGradLam = kNumGrads, kGradPreviousU, kGradPreviousB, kGradDeltaA, kNumTwoSampleGrads };
using TwoSampleNeedsGrad = std::array<bool, kNumTwoSampleGrads>;
using TwoSampleGrads = std::array<at::Tensor, kNumTwoSampleGrads>;

struct TwoSampleBwdInputs {
  OptionalTensor grad_out, grad_last_state;
  TwoSampleInputs in;
  at::Tensor chunk_states;
  TwoSampleNeedsGrad needs_grad{};

  auto grads() { return std::tie(grad_out, grad_last_state); }
  auto saved() { return std::tie(chunk_states); }
  auto fields() {
    return std::tuple_cat(grads(), in.tensors(), std::tie(in.seq_idx, in.cu_seqlens), saved(), in.options(),
                          std::tie(needs_grad));
  }
};

// Raises unless the inputs are as ssm_kernels.selective_scan documents, the values of cu_seqlens apart; returns the method.
Discretization check_two_sample_inputs(const TwoSampleInputs& in);
// Checks the sample before the sequences, for check_two_sample_inputs() and the scan with matrices A.
void check_previous(const ArgumentChecks& checks, const TwoSampleInputs& in);

// The number of states of a call: those of its batch rows or, with cu_seqlens, of its sequences.
c10::SymInt count_sequences(const TwoSampleInputs& in);

// Backward as the kernels know it. The gradients that they write are those of `scan`, grads[kGradLam], grads[kGradDeltaA] and
// grad_previous, of the sample before each sequence, which has no elements if nothing needs it. `finish` then makes the
// gradients of previous_u and previous_B of the latter, and adds its part to that of a constant B.
struct TwoSampleBwd {
  BwdInputs scan;
  TwoSampleGrads grads;
  at::Tensor grad_previous;

  // Checks the arguments of backward alone and allocates, on the device of u (the Meta device included).
  explicit TwoSampleBwd(const TwoSampleBwdInputs& bwd);

  // The first gradients, in the form of make_bwd_params.
  GradTensors of_scan() const;
  TwoSampleGrads finish(const TwoSampleInputs& in) &&;
};

TwoSampleParams make_two_sample_params(const TwoSampleInputs& in);
TwoSampleParams make_two_sample_params(const TwoSampleInputs& in, const TwoSampleBwd& bwd);

// Registers a device's kernels.
template <FwdOutputs (*fwd)(const TwoSampleFwdInputs&), TwoSampleGrads (*bwd)(const TwoSampleBwdInputs&)>
void register_two_sample_kernels(torch::Library& m) {
  implement<fwd>(m, "_selective_scan_two_sample_fwd");
  implement<bwd>(m, "_selective_scan_two_sample_bwd");
}

}  // namespace ssm_kernels::selective_scan
