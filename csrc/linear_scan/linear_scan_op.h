// Between the family's dispatcher-facing half (linear_scan_op.cpp) and its devices: checked arguments, the tensors that forward
// and backward return, and all of them as plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

using OptionalTensor = std::optional<at::Tensor>;

// A public operator of the family: a row's scan, or its step, which is a scan of one step whose tensors have no axis of time.
struct PublicOperator {
  std::string name;
  const RecurrenceRow* row;
  bool is_step;

  const char* state_name() const { return is_step ? "state" : "h0"; }
  std::string schema() const;
};
// Two for each row.
const std::vector<PublicOperator>& public_operators();

// The inputs of forward, by reference: valid for the duration of the call. Messages begin with `recurrence`, the name of a
// public operator.
struct Inputs {
  at::TensorList tensors;
  const OptionalTensor &h0, &cu_seqlens;
  std::string_view recurrence, candidate_activation;
  bool gate_is_logit, reverse;

  c10::SymInt sequences() const;
};

struct Member {
  const char* name;  // of the public operator
  const RecurrenceRow* row;
  RecurrenceOptions options;
};
// Raises unless the inputs are as the functions of ssm_kernels document, the values of cu_seqlens apart.
Member check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor h, last_state;
};
// Uninitialized, except for last states of sequences that may have no steps: these are the initial states.
FwdOutputs allocate_fwd(const Inputs& in);

struct GradTensors {
  std::vector<at::Tensor> inputs;
  at::Tensor h0;
};
// Which gradients backward shall return: of each input, and last of h0.
using NeedsGrad = std::array<bool, kMaxRecurrenceInputs + 1>;
// Checks what backward is given beside the inputs, then as allocate_fwd. What is not needed has no elements.
GradTensors allocate_bwd(const Inputs& in, const at::Tensor& h, const OptionalTensor& grad_h,
                         const OptionalTensor& grad_last_state, const NeedsGrad& needs_grad);

// The sequence that each step belongs to, (seqlen,), int32, in the order in which the scan takes the steps; undefined if each
// entry of the batch is one sequence. The params below keep a pointer to it.
at::Tensor sequence_of_step(const Inputs& in);

LinearScanFwdParams make_fwd_params(const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                    const FwdOutputs& outputs);
LinearScanBwdParams make_bwd_params(const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                    const at::Tensor& h, const OptionalTensor& grad_h, const OptionalTensor& grad_last_state,
                                    const GradTensors& grads);

// The signatures of _linear_recurrence_fwd and _linear_recurrence_bwd.
using FwdSignature = std::tuple<at::Tensor, at::Tensor>(at::TensorList, const OptionalTensor&, const OptionalTensor&,
                                                        std::string_view, std::string_view, bool, bool);
using BwdSignature = std::tuple<std::vector<at::Tensor>, at::Tensor>(const OptionalTensor&, const OptionalTensor&,
                                                                     at::TensorList, const at::Tensor&, const OptionalTensor&,
                                                                     const OptionalTensor&, std::string_view, std::string_view,
                                                                     bool, bool, NeedsGrad);

}  // namespace ssm_kernels::linear_scan
