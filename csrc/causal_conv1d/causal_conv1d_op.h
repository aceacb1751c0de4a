// Between the operator's dispatcher-facing half (causal_conv1d_op.cpp) and its devices: checked arguments, the tensors that
// forward and backward return, and all of them as plain data.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "causal_conv1d/causal_conv1d.h"
#include "torch/checks.h"

namespace ssm_kernels::causal_conv1d {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<std::string_view>;

// References: lives as long as the call.
struct Inputs {
  const at::Tensor &x, &weight;
  const OptionalTensor &bias, &seq_idx, &cu_seqlens, &initial_state;
  OptionalName activation;

  c10::SymInt sequences() const;
};

// Raises unless the inputs are as ssm_kernels.causal_conv1d documents, the values of cu_seqlens apart.
void check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor out, final_state;
};
// Uninitialized, except for final states of sequences that may have no steps: these are the initial states.
FwdOutputs allocate_fwd(const Inputs& in);

enum Grad { kGradX, kGradWeight, kGradBias, kGradInitialState, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
struct BwdInputs {
  const OptionalTensor &grad_out, &grad_final_state;
  Inputs in;
  NeedsGrad needs_grad;
  OptionalTensor grad_out_2;  // present: added to grad_out
};
using GradTensors = std::array<at::Tensor, kNumGrads>;
// Checks what backward is given beside the inputs, then as allocate_fwd. What is not needed has no elements. Without grad_x its
// gradient is allocated, else it is that tensor.
GradTensors allocate_bwd(const BwdInputs& bwd, const OptionalTensor& grad_x);

// A parameter under autocast to `lower`: parameters of a third dtype become float32.
at::Tensor autocast_parameter(const at::Tensor& tensor, at::ScalarType lower, at::DeviceType device_type);
OptionalTensor autocast_parameter(const OptionalTensor& tensor, at::ScalarType lower, at::DeviceType device_type);

// The gradient of out with its contiguous axis where x has its own: kernels go along one of them, and a copy costs less than
// a read across it.
OptionalTensor grad_out_like_x(const OptionalTensor& grad_out, const at::Tensor& x);

// The number of the sequence that each step belongs to; undefined if each row is one. The params keep a pointer to it.
at::Tensor sequence_ids(const Inputs& in);

ConvFwdParams make_fwd_params(const Inputs& in, const at::Tensor& ids, const FwdOutputs& outputs);
ConvBwdParams make_bwd_params(const BwdInputs& bwd, const at::Tensor& ids, const GradTensors& grads);

// The arguments of causal_conv1d_update, by reference.
struct UpdateInputs {
  const at::Tensor &x, &conv_state, &weight;
  const OptionalTensor &bias, &state_batch_indices;
  OptionalName activation;
};
void check_update_inputs(const UpdateInputs& in);
// Uninitialized, contiguous.
at::Tensor allocate_update(const UpdateInputs& in);
// Also raises if two elements of the state share memory, or the state shares memory with an input.
ConvUpdateParams make_update_params(const UpdateInputs& in, const at::Tensor& out);

// The signatures of _causal_conv1d and _causal_conv1d_fwd, of _causal_conv1d_bwd, of _causal_conv1d_bwd_out, which writes
// grad_x where it is told to, and of causal_conv1d_update.
using FwdResult = std::tuple<at::Tensor, at::Tensor>;
using FwdSignature = FwdResult(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                               const OptionalTensor& initial_state, OptionalName activation);
using BwdResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BwdSignature = BwdResult(const OptionalTensor& grad_out, const OptionalTensor& grad_final_state, const at::Tensor& x,
                               const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
                               const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state, OptionalName activation,
                               NeedsGrad needs_grad);
using BwdOutResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using BwdOutSignature = BwdOutResult(const OptionalTensor& grad_out, const OptionalTensor& grad_final_state,
                                     const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                                     const OptionalTensor& initial_state, OptionalName activation, NeedsGrad needs_grad,
                                     at::Tensor& grad_x, const OptionalTensor& grad_out_2);
using UpdateSignature = at::Tensor(const at::Tensor& x, at::Tensor& conv_state, const at::Tensor& weight,
                                   const OptionalTensor& bias, OptionalName activation,
                                   const OptionalTensor& state_batch_indices);

// A device's kernels as the operators' signatures want them. Device has Guard, made from x and alive during the call;
// run(params, x) for each kind of params, which launches or computes; and adds_grads(params), which says whether backward's
// kernels read grad_out_2.
template <typename Device>
struct Kernels {
  static FwdResult fwd(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
                       const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state, OptionalName activation) {
    const Inputs in{x, weight, bias, seq_idx, cu_seqlens, initial_state, activation};
    check_inputs(in);
    const typename Device::Guard guard(in);
    FwdOutputs outputs = allocate_fwd(in);
    if (outputs.out.numel() > 0) {
      const at::Tensor ids = sequence_ids(in);
      Device::run(make_fwd_params(in, ids, outputs), x);
    }
    return {outputs.out, outputs.final_state};
  }

  static BwdResult bwd(const OptionalTensor& grad_out, const OptionalTensor& grad_final_state, const at::Tensor& x,
                       const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
                       const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state, OptionalName activation,
                       NeedsGrad needs_grad) {
    const Inputs in{x, weight, bias, seq_idx, cu_seqlens, initial_state, activation};
    return std::tuple_cat(adjoint({grad_out, grad_final_state, in, needs_grad}, std::nullopt));
  }

  static BwdOutResult bwd_out(const OptionalTensor& grad_out, const OptionalTensor& grad_final_state, const at::Tensor& x,
                              const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
                              const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state, OptionalName activation,
                              NeedsGrad needs_grad, at::Tensor& grad_x, const OptionalTensor& grad_out_2) {
    const Inputs in{x, weight, bias, seq_idx, cu_seqlens, initial_state, activation};
    const GradTensors grads = adjoint({grad_out, grad_final_state, in, needs_grad, grad_out_2}, grad_x);
    return {grads[kGradWeight], grads[kGradBias], grads[kGradInitialState]};
  }

  static at::Tensor update(const at::Tensor& x, at::Tensor& conv_state, const at::Tensor& weight, const OptionalTensor& bias,
                           OptionalName activation, const OptionalTensor& state_batch_indices) {
    const UpdateInputs in{x, conv_state, weight, bias, state_batch_indices, activation};
    check_update_inputs(in);
    const typename Device::Guard guard(in);
    at::Tensor out = allocate_update(in);
    if (out.numel() > 0) Device::run(make_update_params(in, out), x);
    return out;
  }

  static void register_in(torch::Library& m) {
    m.impl("_causal_conv1d_fwd", &fwd);
    m.impl("_causal_conv1d_bwd", &bwd);
    m.impl("_causal_conv1d_bwd_out", &bwd_out);
    m.impl("causal_conv1d_update", &update);
  }

 private:
  static GradTensors adjoint(const BwdInputs& inputs, const OptionalTensor& grad_x) {
    check_inputs(inputs.in);
    const typename Device::Guard guard(inputs.in);
    GradTensors grads = allocate_bwd(inputs, grad_x);
    const at::Tensor ids = sequence_ids(inputs.in);
    const auto params_of = [&](const OptionalTensor& grad_out, const OptionalTensor& grad_out_2) {
      return make_bwd_params({grad_out, inputs.grad_final_state, inputs.in, inputs.needs_grad, grad_out_2}, ids, grads);
    };
    if (is_present(inputs.grad_out_2)) {
      const ConvBwdParams params = params_of(inputs.grad_out, inputs.grad_out_2);
      if (Device::adds_grads(params)) {
        Device::run(params, inputs.in.x);
      } else {
        Device::run(params_of(grad_out_like_x(inputs.grad_out->add(*inputs.grad_out_2), inputs.in.x), {}), inputs.in.x);
      }
    } else {
      Device::run(params_of(grad_out_like_x(inputs.grad_out, inputs.in.x), {}), inputs.in.x);
    }
    return grads;
  }
};

}  // namespace ssm_kernels::causal_conv1d
