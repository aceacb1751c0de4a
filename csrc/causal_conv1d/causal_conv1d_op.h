// Shared by the dispatcher's side of causal_conv1d and causal_conv1d_update (causal_conv1d_op.cpp) and their devices: arguments
// and results of the operators, checks and allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "causal_conv1d/causal_conv1d.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::causal_conv1d {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<std::string_view>;

struct Inputs {
  at::Tensor x, weight;
  OptionalTensor bias, seq_idx, cu_seqlens, initial_state;
  OptionalName activation;

  auto fields() { return std::tie(x, weight, bias, seq_idx, cu_seqlens, initial_state, activation); }
};

// Raises unless the inputs are as ssm_kernels.causal_conv1d documents, the values of cu_seqlens apart.
void check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor out, final_state;

  auto fields() { return std::tie(out, final_state); }
};
// The outputs are uninitialized. Only final states of sequences that may have no steps are filled in, with the initial states.
FwdOutputs allocate_fwd(const Inputs& in);

enum Grad { kGradX, kGradWeight, kGradBias, kGradInitialState, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct BwdInputs {
  OptionalTensor grad_out, grad_final_state;
  Inputs in;
  NeedsGrad needs_grad{};
  // Errors about double backward name it.
  std::string_view layer = "causal_conv1d";
  // Arguments of _causal_conv1d_bwd_out alone: memory for the gradient of x, and a tensor to be added to grad_out.
  OptionalTensor grad_x, grad_out_2;

  auto grads() { return std::tie(grad_out, grad_final_state); }
  auto saved() { return std::tie(); }
  auto fields_but_layer() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
  auto fields() { return std::tuple_cat(fields_but_layer(), std::tie(layer)); }
};

struct BwdOutInputs : BwdInputs {
  at::Tensor required_grad_x;

  auto fields() { return std::tuple_cat(fields_but_layer(), std::tie(required_grad_x, grad_out_2)); }
};
using BwdOutGrads = std::array<at::Tensor, kNumGrads - 1>;  // all but the gradient of x

// Checks the arguments that only backward has, and allocates like allocate_fwd. Gradients that are not needed are empty; the
// gradient of x is grad_x if present.
GradTensors allocate_bwd(const BwdInputs& bwd);

// Returns grad_out, copied if its contiguous axis is not that of x: a copy costs less than strided reads.
OptionalTensor grad_out_like_x(const OptionalTensor& grad_out, const at::Tensor& x);

// The tensor of ConvParams::ids, (batch, seqlen); undefined if each batch row is one sequence. The params keep a pointer to it.
at::Tensor sequence_ids(const Inputs& in);

ConvFwdParams make_fwd_params(const Inputs& in, const at::Tensor& ids, const FwdOutputs& outputs);
// grad_out and grad_out_2 replace those of `bwd`.
ConvBwdParams make_bwd_params(const BwdInputs& bwd, const OptionalTensor& grad_out, const OptionalTensor& grad_out_2,
                              const at::Tensor& ids, const GradTensors& grads);

struct UpdateInputs {
  at::Tensor x, conv_state, weight;
  OptionalTensor bias;
  OptionalName activation;
  OptionalTensor state_batch_indices;

  auto fields() { return std::tie(x, conv_state, weight, bias, activation, state_batch_indices); }
};
void check_update_inputs(const UpdateInputs& in);
// Uninitialized, contiguous.
at::Tensor allocate_update(const UpdateInputs& in);
// Also raises if two elements of the state share memory, or the state shares memory with an input.
ConvUpdateParams make_update_params(const UpdateInputs& in, const at::Tensor& out);

// Arguments of causal_conv1d_update_out, with which the Python function serves those that the other operator lacks.
struct UpdateOutInputs : UpdateInputs {
  at::Tensor out;
  OptionalTensor dst_state_batch_indices;
  std::optional<int64_t> pad_slot_id;
  OptionalTensor num_accepted_tokens, cu_seqlens, intermediate_conv_window, intermediate_state_indices;
  bool disable_state_update = false;

  auto fields() {
    return std::tuple_cat(UpdateInputs::fields(),
                          std::tie(out, dst_state_batch_indices, pad_slot_id, num_accepted_tokens, cu_seqlens,
                                   intermediate_conv_window, intermediate_state_indices, disable_state_update));
  }

  DecodingOptions decoding() const {
    return {state_batch_indices,      dst_state_batch_indices,    pad_slot_id,         num_accepted_tokens, cu_seqlens,
            intermediate_conv_window, intermediate_state_indices, disable_state_update};
  }
  // Whether the other operator, given `out`, would do the same.
  bool is_plain() const {
    return !has_other_slots(state_batch_indices, dst_state_batch_indices, pad_slot_id) && !is_present(num_accepted_tokens) &&
           !is_present(cu_seqlens) && !is_present(intermediate_conv_window) && !disable_state_update;
  }
};
void check_update_out_inputs(const UpdateOutInputs& in);
// Fills in `tokens` too. Also raises if a tensor that is written to shares memory with another argument.
ConvUpdateParams make_update_out_params(const UpdateOutInputs& in, ConvTokenParams& tokens);

// Like bwd, but writes grad_x to the caller's tensor. That tensor is not a result: results must not share memory with
// arguments.
template <GradTensors (*bwd)(const BwdInputs&)>
BwdOutGrads bwd_out(BwdOutInputs& in) {
  in.grad_x = in.required_grad_x;
  GradTensors grads = bwd(in);
  return {std::move(grads[kGradWeight]), std::move(grads[kGradBias]), std::move(grads[kGradInitialState])};
}

// Registers the kernels of the convolution itself, without those of its steps.
template <FwdOutputs (*fwd)(const Inputs&), GradTensors (*bwd)(const BwdInputs&)>
void register_convolution(torch::Library& m) {
  implement<fwd>(m, "_causal_conv1d_fwd");
  implement<bwd>(m, "_causal_conv1d_bwd");
  implement<&bwd_out<bwd>>(m, "_causal_conv1d_bwd_out");
}

// The operators' kernels for a device. Device has Guard, which is constructed from the inputs and lives during the call;
// run(params, x) for each kind of params, run(params, tokens) for steps; and adds_grads(params), whether backward's kernels
// read grad_out_2.
template <typename Device>
struct Kernels {
  static FwdOutputs fwd(const Inputs& in) {
    check_inputs(in);
    const typename Device::Guard guard(in);
    FwdOutputs outputs = allocate_fwd(in);
    if (outputs.out.numel() > 0) {
      const at::Tensor ids = sequence_ids(in);
      Device::run(make_fwd_params(in, ids, outputs), in.x);
    }
    return outputs;
  }

  static GradTensors bwd(const BwdInputs& bwd) {
    check_inputs(bwd.in);
    const typename Device::Guard guard(bwd.in);
    GradTensors grads = allocate_bwd(bwd);
    const at::Tensor ids = sequence_ids(bwd.in), &x = bwd.in.x;
    if (is_present(bwd.grad_out_2)) {
      const ConvBwdParams params = make_bwd_params(bwd, bwd.grad_out, bwd.grad_out_2, ids, grads);
      if (Device::adds_grads(params)) {
        Device::run(params, x);
        return grads;
      }
    }
    const OptionalTensor sum = is_present(bwd.grad_out_2) ? bwd.grad_out->add(*bwd.grad_out_2) : bwd.grad_out;
    const OptionalTensor grad_out = grad_out_like_x(sum, x);
    Device::run(make_bwd_params(bwd, grad_out, /*grad_out_2=*/std::nullopt, ids, grads), x);
    return grads;
  }

  static at::Tensor update(const UpdateInputs& in) {
    check_update_inputs(in);
    const typename Device::Guard guard(in);
    at::Tensor out = allocate_update(in);
    if (out.numel() > 0) Device::run(make_update_params(in, out), /*tokens=*/nullptr);
    return out;
  }

  static NoResult update_out(const UpdateOutInputs& in) {
    check_update_out_inputs(in);
    ConvTokenParams tokens;
    const ConvUpdateParams params = make_update_out_params(in, tokens);
    const typename Device::Guard guard(in, tokens.rows);
    if (in.out.numel() > 0) Device::run(params, in.is_plain() ? nullptr : &tokens);
    return {};
  }

  static void register_in(torch::Library& m) {
    register_convolution<&fwd, &bwd>(m);
    implement<&update>(m, "causal_conv1d_update");
    implement<&update_out>(m, "causal_conv1d_update_out");
  }
};

}  // namespace ssm_kernels::causal_conv1d
