// Shared by the dispatcher's side of selective_state_update_two_sample (two_sample_op.cpp), the step of discretizations that
// read two input samples, have a step of its own for A or complex states, and its devices. What it shares with
// selective_state_update is in selective_state_update_op.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "selective_state_update/selective_state_update_op.h"

namespace ssm_kernels::selective_state_update {

struct TwoSampleInputs : Inputs {
  at::Tensor previous_x, previous_B;  // without elements for discretizations that read one sample
  OptionalTensor lam, dt_A;
  bool lam_sigmoid = false, conjugate_pairs = true;

  TwoSampleInputs() {
    supports = [](Discretization) { return true; };
  }

  auto fields() {
    return std::tie(state, previous_x, previous_B, x, dt, A, B, C, D, z, dt_bias, lam, dt_softplus, state_batch_indices, dt_A,
                    discretization, lam_sigmoid, dt_limit, A_is_log, is_complex, conjugate_pairs);
  }
};
using TwoSampleOutInputs = ServerInputs<TwoSampleInputs>;

// As the functions of selective_state_update_op.h.
void check_inputs(const TwoSampleInputs& in);
void check_out_inputs(const TwoSampleOutInputs& in);
StateUpdateParams make_params(const TwoSampleInputs& in, const at::Tensor& out);
StateUpdateParams make_out_params(const TwoSampleOutInputs& in, TokenParams& tokens);

// `is_packed`: the first axis of lam and dt_A is that of packed tokens.
TwoSampleParams make_two_sample_params(const TwoSampleInputs& in, bool is_packed);

}  // namespace ssm_kernels::selective_state_update
