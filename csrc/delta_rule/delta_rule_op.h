// Shared by the dispatcher's side of delta_rule_scan (delta_rule_op.cpp) and its devices: arguments and results of its
// operators, checks and allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "torch/checks.h"

namespace ssm_kernels::delta_rule {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor q, k;     // (batch, seqlen, heads, key_dim); k has num_householder * seqlen steps, as v and beta
  at::Tensor v, beta;  // (batch, steps, value_heads, value_dim), (batch, steps, value_heads)
  OptionalTensor g;    // (batch, seqlen, value_heads) or (batch, seqlen, value_heads, key_dim)
  std::optional<double> scale;
  OptionalTensor initial_states;  // (batch or sequences, value_heads, value_dim, key_dim)
  OptionalTensor seq_idx, cu_seqlens;
  std::vector<int64_t> states_at;  // ascending, from 0 to seqlen
  bool reverse = false;            // in time: the first step of the scan is the last one of the tensors
  int64_t num_householder = 1;
  bool qk_l2norm = false;
  OptionalTensor A_log, dt_bias;           // (value_heads,), and the shape of a step of g
  std::optional<double> gate_lower_bound;  // with it or A_log, g is raw
  bool beta_sigmoid = false, allow_neg_eigval = false;

  auto fields() {
    return std::tie(q, k, v, beta, g, scale, initial_states, seq_idx, cu_seqlens, states_at, reverse, num_householder,
                    qk_l2norm, A_log, dt_bias, gate_lower_bound, beta_sigmoid, allow_neg_eigval);
  }

  bool has_raw_gate() const { return is_present(A_log) || gate_lower_bound.has_value(); }
  bool has_gate_per_channel() const { return is_present(g) && g->dim() == 4; }
};

// The argument scale, by default key_dim^-1/2.
double scale_of(const Inputs& in);

// Raises unless the inputs are as ssm_kernels.delta_rule_scan documents, the values of cu_seqlens apart.
void check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor out, final_states;
  at::Tensor states;  // (batch, positions, value_heads, value_dim, key_dim)

  auto fields() { return std::tie(out, final_states, states); }
};
// Uninitialized, on the device of q (the Meta device included).
FwdOutputs allocate_fwd(const Inputs& in);

enum Grad { kGradQ, kGradK, kGradV, kGradBeta, kGradG, kGradInitialStates, kGradALog, kGradDtBias, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct BwdInputs {
  OptionalTensor grad_out, grad_final_states, grad_states;
  Inputs in;
  NeedsGrad needs_grad = {};

  auto grads() { return std::tie(grad_out, grad_final_states, grad_states); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};

// Checks the arguments of backward alone and allocates as allocate_fwd does. The gradient of a sequence has its layout, those
// of parameters and states are contiguous, and those absent or not needed have no elements.
GradTensors allocate_bwd(const BwdInputs& bwd);

// Forward and backward without the dispatcher, on any device and on Meta.
FwdOutputs fwd(const Inputs& in);
GradTensors bwd(const BwdInputs& bwd);

}  // namespace ssm_kernels::delta_rule
