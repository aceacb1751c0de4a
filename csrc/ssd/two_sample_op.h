// Shared by the dispatcher's side of ssd_chunk_scan_two_sample (two_sample_op.cpp), the chunked scan with a discretization that
// reads two input samples a step, and its gates. What it shares with ssd_chunk_scan is in ssd_op.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Callers in C++ may give A a step, (batch, seqlen, heads), and with `premultiplied` zeta, d A, in its place.
struct TwoSampleInputs {
  at::Tensor x, dt, A, B, C;
  OptionalTensor D, z, dt_bias, initial_states, lam, previous_x, previous_B, seq_idx, cu_seqlens;
  std::string_view discretization;  // of the caller's string
  bool lam_sigmoid = false, repeats_first = false;
  std::optional<c10::SymInt> chunk_size;
  bool dt_softplus = false;
  double dt_min = 0, dt_max = 0;  // as those of Inputs
  bool reverse = false;
  // The members below are set by callers in C++; no schema has them.
  bool premultiplied = false;
  bool are_cu_seqlens_checked = false;  // the values
  // As Inputs::ranks. previous_x is then v of the sample before, (sequences, ranks, heads, headdim), and previous_B (sequences,
  // ranks, groups, dstate).
  const Ranks* ranks = nullptr;
  const Rotation* rotation = nullptr;  // as Inputs::rotation; previous_B then has heads in place of groups

  auto tensors() { return std::tie(x, dt, A, B, C, D, z, dt_bias, initial_states, lam, previous_x, previous_B); }
  auto fields() {
    return std::tuple_cat(tensors(), std::tie(seq_idx, cu_seqlens, discretization, lam_sigmoid, repeats_first, chunk_size,
                                              dt_softplus, dt_min, dt_max, reverse));
  }

  // The arguments that ssd_chunk_scan has too.
  Inputs of_scan() const;
};

// In the order of tensors(): the first are those of Grad.
enum TwoSampleGrad { kGradLam = kGradInitialStates + 1, kGradPreviousX, kGradPreviousB, kNumTwoSampleGrads };
using TwoSampleGrads = std::array<at::Tensor, kNumTwoSampleGrads>;

struct TwoSampleBwdInputs {
  OptionalTensor grad_out, grad_final_states;
  TwoSampleInputs in;
  std::array<bool, kNumTwoSampleGrads> needs_grad = {};
  const RankGrads* rank_grads = nullptr;  // as BwdInputs::rank_grads
  // Whether the gradients of B and C have the accumulation type. Callers in C++ set it; no schema has it.
  bool wide_row_grads = false;

  auto grads() { return std::tie(grad_out, grad_final_states); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};

// Forward and backward for operators composed of this one, which have checked the arguments. Not on Meta.
FwdOutputs two_sample_scan(const TwoSampleInputs& in, Discretization method);
TwoSampleGrads two_sample_scan_adjoint(const TwoSampleBwdInputs& bwd, Discretization method);

// Takes the last step of each sequence, in the scan's order, of (batch, seqlen, ...). A sequence without steps takes that of
// `before`, or zero.
at::Tensor last_steps(const TwoSampleInputs& in, const at::Tensor& steps, const OptionalTensor& before);

}  // namespace ssm_kernels::ssd
