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
#include "torch/decoding_op.h"
#include "torch/dispatch.h"

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

  // Each row has one slot; several tokens are a sequence.
  bool is_plain() const { return true; }
};
void check_inputs(const UpdateInputs& in);
// Uninitialized, contiguous.
at::Tensor allocate_out(const UpdateInputs& in);
// Also raises if two elements of the state share memory, or the state shares memory with an input.
ConvUpdateParams make_params(const UpdateInputs& in, const at::Tensor& out);

using UpdateOutInputs = ServerInputs<UpdateInputs>;
void check_out_inputs(const UpdateOutInputs& in);
// Fills in `tokens` too. Also raises if a tensor that is written to shares memory with another argument.
ConvUpdateParams make_out_params(const UpdateOutInputs& in, ConvTokenParams& tokens);

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
// run(params, x) for both kinds of params; adds_grads(params), whether backward's kernels read grad_out_2; and Steps, a Device
// of DecodingKernels.
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

  static void register_in(torch::Library& m) {
    register_convolution<&fwd, &bwd>(m);
    using Steps = DecodingKernels<typename Device::Steps>;
    implement<&Steps::step>(m, "causal_conv1d_update");
    implement<&Steps::out>(m, "causal_conv1d_update_out");
  }
};

}  // namespace ssm_kernels::causal_conv1d
