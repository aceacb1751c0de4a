// Shared by the dispatcher's side of mlstm_step (mlstm_step_op.cpp) and its devices: arguments, checks and allocation, and
// conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "mlstm/mlstm_step.h"

namespace ssm_kernels::mlstm::step {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor C, n, m, q, k, v, i, f;
  std::optional<double> scale;
  double eps = 1e-6;
  std::string_view input_gate;
  bool normalize = true;
  OptionalTensor state_batch_indices;

  auto fields() { return std::tie(C, n, m, q, k, v, i, f, scale, eps, input_gate, normalize, state_batch_indices); }
};

// Raises unless the inputs are as ssm_kernels.mlstm_step documents.
void check_inputs(const Inputs& in);

// Uninitialized, contiguous, like v (the Meta device included).
at::Tensor allocate_out(const Inputs& in);

// Also raises if two elements of a state share memory, or a state shares memory with another argument.
StepParams make_params(const Inputs& in, const at::Tensor& out);

}  // namespace ssm_kernels::mlstm::step
