// Shared by the dispatcher's side of mamba3_state_update (mamba3_step_op.cpp) and its devices: arguments, checks and
// allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "mamba3/mamba3_step.h"

namespace ssm_kernels::mamba3::step {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor angle, ssm, previous_k, previous_x, x, dt, A, B, C, trap, angles;
  OptionalTensor B_bias, C_bias, D, z, mimo_x, mimo_z, mimo_out, norm_weight;
  double norm_eps = 1e-5;
  std::string_view rotate;
  OptionalTensor state_batch_indices;

  auto fields() {
    return std::tie(angle, ssm, previous_k, previous_x, x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, mimo_x, mimo_z,
                    mimo_out, norm_weight, norm_eps, rotate, state_batch_indices);
  }

  // B and C have an axis of ranks after that of the batch.
  bool has_ranks() const { return B.dim() == 4; }
};

// Raises unless the inputs are as ssm_kernels.mamba3_state_update documents.
void check_inputs(const Inputs& in);

// Uninitialized, contiguous, like x (the Meta device included).
at::Tensor allocate_out(const Inputs& in);

// Raises if two elements of a state share memory, or a state shares memory with another argument.
void check_memory(const Inputs& in);

// The step as operators of PyTorch, on any device.
at::Tensor step_aten(const Inputs& in);

StepParams make_params(const Inputs& in, const at::Tensor& out);

}  // namespace ssm_kernels::mamba3::step
