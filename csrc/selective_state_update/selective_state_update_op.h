// Shared by the dispatcher's side of selective_state_update (selective_state_update_op.cpp) and its devices: arguments, checks
// and allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "selective_state_update/selective_state_update.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

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

  auto fields() {
    return std::tie(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, discretization, dt_limit, A_is_log);
  }

  // Whether each row has one token and one slot.
  bool is_one_step() const;
};

// Arguments of selective_state_update_out, with which the Python function serves those that the one step lacks.
struct OutInputs : Inputs {
  at::Tensor out;
  OptionalTensor dst_state_batch_indices;
  std::optional<int64_t> pad_slot_id;
  OptionalTensor num_accepted_tokens, cu_seqlens, intermediate_states_buffer, intermediate_state_indices;
  bool disable_state_update = false;

  OutInputs() = default;
  OutInputs(const Inputs& in, at::Tensor out);

  auto fields() {
    return std::tuple_cat(Inputs::fields(),
                          std::tie(out, dst_state_batch_indices, pad_slot_id, num_accepted_tokens, cu_seqlens,
                                   intermediate_states_buffer, intermediate_state_indices, disable_state_update));
  }

  DecodingOptions decoding() const {
    return {state_batch_indices,        dst_state_batch_indices,    pad_slot_id,         num_accepted_tokens, cu_seqlens,
            intermediate_states_buffer, intermediate_state_indices, disable_state_update};
  }
  // Whether the other operator, given `out`, would do the same.
  bool is_one_step() const;
};

// Raises unless the inputs are as ssm_kernels.selective_state_update documents; returns the method.
Discretization check_inputs(const Inputs& in);
Discretization check_out_inputs(const OutInputs& in);

// Uninitialized, contiguous, of the shape, dtype and device of x (the Meta device included).
at::Tensor allocate_out(const Inputs& in);

// Also raises if two elements of the state share memory, or the state shares memory with another input.
StateUpdateParams make_params(const Inputs& in, Discretization method, const at::Tensor& out);
// Fills in `tokens` too. Also raises if `out` or the buffer of intermediate states shares memory with
// another argument.
StateUpdateParams make_out_params(const OutInputs& in, Discretization method, TokenParams& tokens);

}  // namespace ssm_kernels::selective_state_update
