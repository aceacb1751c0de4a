// Shared by the dispatcher's side of selective_scan_summary (selective_scan_summary_op.cpp) and its devices: arguments and
// results of its operators, checks and allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <tuple>

#include "selective_scan/selective_scan_op.h"
#include "torch/dispatch.h"

namespace ssm_kernels::selective_scan {

// The summary of a span of steps: the map from the state before it to the state after it.
struct SummaryInputs {
  at::Tensor u, delta, A, B;
  OptionalTensor delta_bias;
  std::string_view discretization;
  bool delta_softplus = false;

  auto fields() { return std::tie(u, delta, A, B, delta_bias, discretization, delta_softplus); }

  // The scan with this last state. It reads B as C, whose outputs nobody reads.
  Inputs scan() const;
};
Discretization check_summary_inputs(const SummaryInputs& in);

struct SummaryOutputs {
  at::Tensor last_state;  // from zero, (batch, dim, dstate)
  at::Tensor decay;       // the product of all Abar, (batch, dim, dstate)

  auto fields() { return std::tie(last_state, decay); }
};
SummaryOutputs allocate_summary(const SummaryInputs& in);

enum SummaryGrad { kSummaryGradU, kSummaryGradDelta, kSummaryGradA, kSummaryGradB, kSummaryGradDeltaBias, kNumSummaryGrads };
using SummaryGrads = std::array<at::Tensor, kNumSummaryGrads>;

struct SummaryBwdInputs {
  OptionalTensor grad_last_state, grad_decay;
  SummaryInputs in;
  std::array<bool, kNumSummaryGrads> needs_grad{};

  auto grads() { return std::tie(grad_last_state, grad_decay); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};

// The gradient of the state before a span of steps, from the gradients of its outputs, after the gate if there is z.
struct InitialGradientInputs {
  at::Tensor grad_out, delta, A, C;
  OptionalTensor z, delta_bias;
  std::string_view discretization;
  bool delta_softplus = false;

  auto fields() { return std::tie(grad_out, delta, A, C, z, delta_bias, discretization, delta_softplus); }

  // The scan with these arguments, with the gradients of outputs as u and C as B.
  Inputs scan() const;
};
Discretization check_initial_gradient_inputs(const InitialGradientInputs& in);
at::Tensor allocate_initial_gradient(const InitialGradientInputs& in);

// Whether Abar is an exponential.
bool has_exponential_transition(Discretization method);

// On any device, of the scan and its adjoint.
SummaryGrads summary_adjoint(const SummaryBwdInputs& bwd);

template <SummaryOutputs (*fwd)(const SummaryInputs&), SummaryGrads (*bwd)(const SummaryBwdInputs&),
          at::Tensor (*initial_gradient)(const InitialGradientInputs&)>
void register_summary_kernels(torch::Library& m) {
  implement<fwd>(m, "_selective_scan_summary_fwd");
  implement<bwd>(m, "_selective_scan_summary_bwd");
  implement<initial_gradient>(m, "_selective_scan_initial_gradient");
}

}  // namespace ssm_kernels::selective_scan
