// Between the operator's dispatcher-facing half (selective_state_update_op.cpp) and its devices: checked arguments, and
// plain-data views of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "selective_state_update/selective_state_update.h"

namespace ssm_kernels::selective_state_update {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalLimit = std::optional<at::ArrayRef<double>>;

// References: lives as long as the call.
struct Inputs {
  const at::Tensor &state, &x, &dt, &A, &B, &C;
  const OptionalTensor &D, &z, &dt_bias, &state_batch_indices;
  OptionalLimit dt_limit;
  bool A_is_log;
};

// Raises unless the inputs are as ssm_kernels.selective_state_update documents; returns the method.
Discretization check_inputs(const Inputs& in, std::string_view discretization);

// Uninitialized, contiguous, of the shape, dtype and device of x (the Meta device included).
at::Tensor allocate_out(const Inputs& in);

// Also raises if two elements of the state share memory.
StateUpdateParams make_params(const Inputs& in, Discretization method, bool dt_softplus, const at::Tensor& out);

}  // namespace ssm_kernels::selective_state_update
