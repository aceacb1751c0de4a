// Shared by the dispatcher's side of selective_state_update (selective_state_update_op.cpp) and its devices: arguments, checks
// and allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "selective_state_update/selective_state_update.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"
#include "torch/memory_overlap.h"

namespace ssm_kernels::selective_state_update {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor state, x, dt, A, B, C;
  OptionalTensor D, z, dt_bias;
  bool dt_softplus = false;
  OptionalTensor state_batch_indices;
  std::string_view discretization;
  std::optional<at::ArrayRef<double>> dt_limit;
  bool A_is_log = false;

  bool (*supports)(Discretization) = &is_one_sample;  // not an argument
  // selective_state_update_two_sample sets it: states are complex, and B and C have the accumulation type.
  bool is_complex = false;

  auto fields() {
    return std::tie(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, discretization, dt_limit, A_is_log);
  }

  // Whether each row has one token and one slot.
  bool is_plain() const;
};

using OutInputs = ServerInputs<Inputs>;

// Raises unless the inputs are as ssm_kernels.selective_state_update documents.
void check_inputs(const Inputs& in);
void check_out_inputs(const OutInputs& in);

// Uninitialized, contiguous, of the shape, dtype and device of x (the Meta device included).
at::Tensor allocate_out(const Inputs& in);

// The arguments that a step reads, the state apart.
std::array<NamedTensor, 9> read_arguments(const Inputs& in);

// Also raises if two elements of the state share memory, or the state shares memory with another input.
StateUpdateParams make_params(const Inputs& in, const at::Tensor& out);
// Fills in `tokens` too. Also raises if `out` or the buffer of intermediate states shares memory with
// another argument.
StateUpdateParams make_out_params(const OutInputs& in, TokenParams& tokens);

}  // namespace ssm_kernels::selective_state_update
