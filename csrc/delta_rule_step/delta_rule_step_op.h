// Shared by the dispatcher's side of delta_rule_step (delta_rule_step_op.cpp) and its devices: arguments, checks and
// allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "delta_rule_step/delta_rule_step.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"

namespace ssm_kernels::delta_rule_step {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor states, q, k, v, beta;
  OptionalTensor g;
  std::optional<double> scale;
  OptionalTensor state_batch_indices;
  bool qk_l2norm = false;
  OptionalTensor A_log, dt_bias;
  std::optional<double> gate_lower_bound;
  bool beta_sigmoid = false, allow_neg_eigval = false;
  int64_t num_householder = 1;

  auto fields() {
    return std::tie(states, q, k, v, beta, g, scale, state_batch_indices, qk_l2norm, A_log, dt_bias, gate_lower_bound,
                    beta_sigmoid, allow_neg_eigval, num_householder);
  }

  // Whether each row has one token and one slot.
  bool is_plain() const;
};

using OutInputs = ServerInputs<Inputs>;

// Raises unless the inputs are as ssm_kernels.delta_rule_step documents.
void check_inputs(const Inputs& in);
void check_out_inputs(const OutInputs& in);

// Uninitialized, contiguous, of the shape, dtype and device of v, with one entry a token (the Meta device included).
at::Tensor allocate_out(const Inputs& in);

// Also raises if two elements of the states share memory, or the states share memory with another input.
StepParams make_params(const Inputs& in, const at::Tensor& out);
// Fills in `tokens` too. Also raises if `out` or the buffer of intermediate states shares memory with another argument.
StepParams make_out_params(const OutInputs& in, TokenParams& tokens);

}  // namespace ssm_kernels::delta_rule_step
