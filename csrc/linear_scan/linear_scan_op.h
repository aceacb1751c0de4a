// Shared by the dispatcher's side of the linear recurrences (linear_scan_op.cpp) and their devices: arguments and results of
// the operators, checks and allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "linear_scan/linear_scan.h"
#include "torch/dispatch.h"

namespace ssm_kernels::linear_scan {

using OptionalTensor = std::optional<at::Tensor>;

// A public operator of the family: a row's scan; its step, which is a scan of one step whose tensors have no axis of time; or
// its summary, the map from the state before a span of steps to the state after it.
enum class Kind { kScan, kStep, kSummary };
struct PublicOperator {
  std::string name;
  const RecurrenceRow* row;
  Kind kind;

  const char* state_name() const { return kind == Kind::kStep ? "state" : "h0"; }
  std::string schema() const;
};
// Three for each row.
const std::vector<PublicOperator>& public_operators();

// Messages begin with `recurrence`, the name of a public operator.
struct Inputs {
  at::TensorList tensors;
  OptionalTensor h0, cu_seqlens, reset;
  std::string_view recurrence, candidate_activation;
  bool gate_is_logit = true, reverse = false;
  std::vector<at::Tensor> cast;  // the memory of `tensors` under autocast

  // The number of states: one per batch row or, with cu_seqlens, per packed sequence.
  c10::SymInt sequences() const;

  auto fields_but_tensors() {
    return std::tie(h0, cu_seqlens, reset, recurrence, candidate_activation, gate_is_logit, reverse);
  }
  auto fields() { return std::tuple_cat(std::tie(tensors), fields_but_tensors()); }
};

struct Member {
  const char* name;  // of the public operator
  const RecurrenceRow* row;
  RecurrenceOptions options;
};
// Raises unless the inputs are as the functions of ssm_kernels document. Does not check the values of cu_seqlens.
Member check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor h, last_state;

  auto fields() { return std::tie(h, last_state); }
};
// Uninitialized, except for last states of sequences that may have no steps: these are the initial states.
FwdOutputs allocate_fwd(const Inputs& in);

// Which gradients backward shall return: of each input, and last of h0.
using NeedsGrad = std::array<bool, kMaxRecurrenceInputs + 1>;

struct BwdInputs {
  OptionalTensor grad_h, grad_last_state;
  Inputs in;
  at::Tensor h;
  NeedsGrad needs_grad{};

  auto grads() { return std::tie(grad_h, grad_last_state); }
  auto saved() { return std::tie(h); }
  auto fields() { return std::tuple_cat(grads(), std::tie(in.tensors, h), in.fields_but_tensors(), std::tie(needs_grad)); }
};

// The gradient of each input, then the gradient of h0.
using GradTensors = std::array<at::Tensor, kMaxRecurrenceInputs + 1>;
// Checks the arguments of backward alone and allocates as allocate_fwd does. Gradients that are not needed, or of inputs that
// the recurrence does not have, have no elements.
GradTensors allocate_bwd(const BwdInputs& bwd);

// The sequence that each step belongs to, (seqlen,), int32, in the order in which the scan takes the steps; undefined if each
// batch row is one sequence. The params below keep a pointer to it.
at::Tensor sequence_of_step(const Inputs& in);

LinearScanFwdParams make_fwd_params(const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                    const FwdOutputs& outputs);
LinearScanBwdParams make_bwd_params(const BwdInputs& bwd, const Member& member, const at::Tensor& sequence_of_step,
                                    const GradTensors& grads);

template <FwdOutputs (*fwd)(const Inputs&), GradTensors (*bwd)(const BwdInputs&)>
void register_kernels(torch::Library& m) {
  implement<fwd>(m, "_linear_recurrence_fwd");
  implement<bwd>(m, "_linear_recurrence_bwd");
}

// A summary has no initial state.
struct SummaryInputs : Inputs {
  auto fields() { return std::tie(tensors, cu_seqlens, reset, recurrence, candidate_activation, gate_is_logit, reverse); }
};

struct SummaryOutputs {
  at::Tensor last_state, decay;

  auto fields() { return std::tie(last_state, decay); }
};
SummaryOutputs allocate_summary(const SummaryInputs& in);

struct SummaryBwdInputs {
  OptionalTensor grad_last_state, grad_decay;
  SummaryInputs in;
  std::array<bool, kMaxRecurrenceInputs> needs_grad{};

  auto grads() { return std::tie(grad_last_state, grad_decay); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};
using SummaryGrads = std::array<at::Tensor, kMaxRecurrenceInputs>;
// As allocate_bwd.
SummaryGrads allocate_summary_bwd(const SummaryBwdInputs& bwd);

LinearScanSummaryParams make_summary_params(const SummaryInputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                            const SummaryOutputs& outputs);

// In linear_scan_summary.cpp: the adjoint as two scans and their adjoints, on any device.
SummaryGrads summary_adjoint(const SummaryBwdInputs& bwd);

template <SummaryOutputs (*fwd)(const SummaryInputs&), SummaryGrads (*bwd)(const SummaryBwdInputs&)>
void register_summary_kernels(torch::Library& m) {
  implement<fwd>(m, "_linear_recurrence_summary_fwd");
  implement<bwd>(m, "_linear_recurrence_summary_bwd");
}

// The operator that all public ones call.
const Operator<FwdOutputs, Inputs>& recurrence_op();

}  // namespace ssm_kernels::linear_scan
