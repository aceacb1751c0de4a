// The delta rule reads normalized q and k, the gate's log decay g and beta of each step. These functions compute them from the
// arguments, and the adjoints.
//
//   q, k: x (x.x + 1e-6)^-1/2 with qk_l2norm
//   g:    -e^A_log softplus(raw + dt_bias), or gate_lower_bound sigmoid(e^A_log (raw + dt_bias)), without A_log e^A_log = 1
//   beta: sigmoid(raw) with beta_sigmoid, twice that with allow_neg_eigval
#pragma once

#include <ATen/core/Tensor.h>

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Rows of q or k, (..., key_dim).
struct NormalizedRows {
  at::Tensor rows;
  at::Tensor factor;  // of the raw rows, (..., 1); undefined without norm
};
// raw: in the accumulation type.
NormalizedRows normalized(const Inputs& in, const at::Tensor& raw);
// The gradient of the raw rows.
at::Tensor normalized_adjoint(const NormalizedRows& of, const at::Tensor& grad);

// Log decays, of raw values (..., value_heads) or (..., value_heads, key_dim): float64 if one serves a head, else in the
// accumulation type.
at::Tensor log_decays(const Inputs& in, const at::Tensor& raw);
struct GateGrads {
  at::Tensor raw;    // of g
  at::Tensor A_log;  // (value_heads,), float64; undefined without A_log
};
GateGrads log_decays_adjoint(const Inputs& in, const at::Tensor& raw, const at::Tensor& grad);

at::Tensor betas(const Inputs& in, const at::Tensor& raw);
at::Tensor betas_adjoint(const Inputs& in, const at::Tensor& raw, const at::Tensor& grad);

}  // namespace ssm_kernels::delta_rule
