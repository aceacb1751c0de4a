// selective_scan_summary on every device: checks, allocation, Meta, Autograd and Autocast, and the composition of scans that is
// its adjoint on all devices.
//
//   last_state   the last state of the scan, begun with zero
//   decay        e^(A sum of delta) where Abar is an exponential, with the sum in fp64; else the last state of the scan without
//                input, begun with one
//
// The adjoint of the first is the scan's. With E the gradient of the second, of e^(A S): grad A = sum over the batch of E decay
// S, grad delta_t = sum over the states of E decay A; of the scan without input: that scan's adjoint.

#include "selective_scan/selective_scan_summary_op.h"

#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "common/limits.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/schemas.h"

namespace ssm_kernels::selective_scan {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The summary of a span of steps: the last state from zero, and the product of all Abar. Forward alone, and its adjoint.
  schemas.def(
      "selective_scan_summary(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor? delta_bias=None, *, "
      "str discretization='zoh', bool delta_softplus=False) -> (Tensor last_state, Tensor decay)");
  const std::string scan_summary_arguments =
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor? delta_bias, str discretization, bool delta_softplus";
  schemas.kernels("_selective_scan_summary_fwd(" + scan_summary_arguments + ") -> (Tensor last_state, Tensor decay)");
  schemas.kernels("_selective_scan_summary_bwd(Tensor? grad_last_state, Tensor? grad_decay, " + scan_summary_arguments +
                  ", bool[5] needs_grad) -> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor "
                  "grad_delta_bias)");
  // The gradient of the state before a span, from the gradients of <C, h> silu(z): sum over t of (product of Abar up to t) C_t
  // grad_out_t silu(z_t).
  schemas.kernels(
      "_selective_scan_initial_gradient(Tensor grad_out, Tensor delta, Tensor A, Tensor C, Tensor? z, Tensor? delta_bias, "
      "str discretization, bool delta_softplus) -> Tensor");
  schemas.refuse_nested("selective_scan_summary");
}

namespace {

constexpr char kSummaryOp[] = "selective_scan_summary";

std::array<c10::SymInt, 3> state_shape(const at::Tensor& u, const at::Tensor& A) {
  return {u.sym_size(0), u.sym_size(1), A.sym_size(1)};
}

}  // namespace

bool has_exponential_transition(Discretization method) {
  bool result = false;
  visit_discretization(method, [&](auto rule) { result = decltype(rule)::kExponential; });
  return result;
}

Inputs SummaryInputs::scan() const {
  Inputs scan;
  scan.u = u;
  scan.delta = delta;
  scan.A = A;
  scan.B = B;
  scan.C = B;
  scan.delta_bias = delta_bias;
  scan.discretization = discretization;
  scan.delta_softplus = delta_softplus;
  return scan;
}

Inputs InitialGradientInputs::scan() const {
  Inputs scan = SummaryInputs{grad_out, delta, A, C, delta_bias, discretization, delta_softplus}.scan();
  scan.z = z;
  return scan;
}

Discretization check_summary_inputs(const SummaryInputs& in) { return check_inputs_of(kSummaryOp, in.scan()); }

Discretization check_initial_gradient_inputs(const InitialGradientInputs& in) {
  return check_inputs_of("selective_scan's initial gradient", in.scan());
}

SummaryOutputs allocate_summary(const SummaryInputs& in) {
  const auto state = [&] { return empty_tensor(state_shape(in.u, in.A), in.A.options()); };
  return {state(), state()};
}

at::Tensor allocate_initial_gradient(const InitialGradientInputs& in) {
  return empty_tensor(state_shape(in.grad_out, in.A), in.A.options());
}

namespace {

SummaryGrads allocate_summary_bwd(const SummaryBwdInputs& bwd) {
  const SummaryInputs& in = bwd.in;
  const ArgumentChecks checks("selective_scan_summary backward", "u", in.u);
  const auto shape = state_shape(in.u, in.A);
  checks.tensor("grad_last_state", bwd.grad_last_state, "(batch, dim, dstate)", shape, checks.accumulate());
  checks.tensor("grad_decay", bwd.grad_decay, "(batch, dim, dstate)", shape, checks.accumulate());
  const auto allocate = [&](SummaryGrad grad, const OptionalTensor& input, bool is_parameter) {
    if (!is_present(input) || !bwd.needs_grad[grad]) return empty_tensor({0}, in.A.options());
    return is_parameter ? empty_tensor(input->sym_sizes(), input->options()) : empty_tensor_like(*input);
  };
  return {allocate(kSummaryGradU, in.u, false), allocate(kSummaryGradDelta, in.delta, false),
          allocate(kSummaryGradA, in.A, true), allocate(kSummaryGradB, in.B, in.B.dim() == 2),
          allocate(kSummaryGradDeltaBias, in.delta_bias, true)};
}

// delta + bias in the accumulation type; and the sum over all steps of its softplus, or of itself, float64, (batch, dim, 1).
struct StepSum {
  at::Tensor biased, sum;

  explicit StepSum(const SummaryInputs& in) {
    biased = in.delta.to(in.A.scalar_type());
    if (is_present(in.delta_bias)) biased = biased + in.delta_bias->unsqueeze(1);
    const at::Tensor size = in.delta_softplus ? at::softplus(biased, /*beta=*/1, /*threshold=*/20) : biased;
    sum = size.sum(at::IntArrayRef{-1}, /*keepdim=*/true, at::kDouble);
  }

  at::Tensor decay(const at::Tensor& A) const { return (A.to(at::kDouble) * sum).exp_(); }
};

at::Tensor chunk_states_of(const Inputs& scan) {
  static const Operator<FwdOutputs, FwdInputs> op("ssm_kernels::_selective_scan_fwd");
  FwdInputs call;
  static_cast<Inputs&>(call) = scan;
  call.save_chunk_states = true;
  return op(call).chunk_states;
}

// The scan whose last state is the product of all Abar.
Inputs scan_of_decays(const SummaryInputs& in) {
  Inputs scan = in.scan();
  scan.u = at::zeros_like(in.u);
  scan.initial_state = at::ones_symint(state_shape(in.u, in.A), in.A.options());
  return scan;
}

// The gradients of the scan's inputs, from the gradient of its last state.
GradTensors adjoint_of(const Inputs& scan, const at::Tensor& grad_last_state, const NeedsGrad& needs_grad) {
  static const Operator<GradTensors, BwdInputs> op("ssm_kernels::_selective_scan_bwd");
  BwdInputs bwd;
  bwd.grad_last_state = grad_last_state;
  bwd.in = scan;
  bwd.in.initial_state.reset();
  bwd.chunk_states = chunk_states_of(scan);
  bwd.needs_grad = needs_grad;
  return op(bwd);
}

}  // namespace

SummaryGrads summary_adjoint(const SummaryBwdInputs& bwd) {
  const SummaryInputs& in = bwd.in;
  const Discretization method = check_summary_inputs(in);
  SummaryGrads grads = allocate_summary_bwd(bwd);
  for (at::Tensor& grad : grads) grad.zero_();
  const auto add = [&](SummaryGrad grad, const at::Tensor& value) {
    if (grads[grad].numel() > 0) grads[grad].add_(value);
  };
  NeedsGrad needs_grad{};
  needs_grad[kGradU] = bwd.needs_grad[kSummaryGradU];
  needs_grad[kGradDelta] = bwd.needs_grad[kSummaryGradDelta];
  needs_grad[kGradA] = bwd.needs_grad[kSummaryGradA];
  needs_grad[kGradB] = bwd.needs_grad[kSummaryGradB];
  needs_grad[kGradDeltaBias] = bwd.needs_grad[kSummaryGradDeltaBias];
  const auto add_all = [&](const GradTensors& of_scan) {
    add(kSummaryGradU, of_scan[kGradU]);
    add(kSummaryGradDelta, of_scan[kGradDelta]);
    add(kSummaryGradA, of_scan[kGradA]);
    add(kSummaryGradB, of_scan[kGradB]);
    add(kSummaryGradDeltaBias, of_scan[kGradDeltaBias]);
  };
  if (is_present(bwd.grad_last_state)) add_all(adjoint_of(in.scan(), *bwd.grad_last_state, needs_grad));
  if (!is_present(bwd.grad_decay)) return grads;
  if (!has_exponential_transition(method)) {
    needs_grad[kGradU] = needs_grad[kGradB] = false;
    const GradTensors of_scan = adjoint_of(scan_of_decays(in), *bwd.grad_decay, needs_grad);
    add(kSummaryGradDelta, of_scan[kGradDelta]);
    add(kSummaryGradA, of_scan[kGradA]);
    add(kSummaryGradDeltaBias, of_scan[kGradDeltaBias]);
    return grads;
  }
  const StepSum steps(in);
  const at::Tensor grad_exponent = bwd.grad_decay->to(at::kDouble) * steps.decay(in.A);
  // An infinite sum or A has the decay and the gradient zero, not the NaN of zero times infinity.
  add(kSummaryGradA, (grad_exponent * steps.sum.clamp_max(std::numeric_limits<double>::max())).sum(0));
  const at::Tensor A = in.A.to(at::kDouble).clamp(-kLargestRate<double>, kLargestRate<double>);
  at::Tensor grad_delta = (grad_exponent * A).sum(-1, /*keepdim=*/true).expand(in.delta.sizes());
  if (in.delta_softplus) grad_delta = at::softplus_backward(grad_delta, steps.biased.to(at::kDouble), 1, 20);
  add(kSummaryGradDelta, grad_delta);
  if (is_present(in.delta_bias)) add(kSummaryGradDeltaBias, grad_delta.sum(at::IntArrayRef({0, 2})));
  return grads;
}

namespace {

// Saves the inputs and nothing else.
struct SelectiveScanSummary : DifferentiableOp<SelectiveScanSummary, SummaryBwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::selective_scan_summary";
  static constexpr char kForward[] = "ssm_kernels::_selective_scan_summary_fwd",
                        kBackward[] = "ssm_kernels::_selective_scan_summary_bwd";
  static constexpr bool kIsPublic = true;

  static const char* name(const Inputs&) { return kSummaryOp; }
  static auto differentiable(Inputs& in) { return std::tie(in.u, in.delta, in.A, in.B, in.delta_bias); }

  // Sequences in the autocast dtype; parameters in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.u, in.delta);
    to.to_float(in.A, in.delta_bias);
    in.B.dim() == 2 ? to.to_float(in.B) : to.to_lower(in.B);
  }
};

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(SelectiveScanSummary)

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  register_summary_kernels<&meta<check_summary_inputs, allocate_summary, SummaryInputs>,
                           &meta<check_summary_inputs, allocate_summary_bwd, SummaryBwdInputs>,
                           &meta<check_initial_gradient_inputs, allocate_initial_gradient, InitialGradientInputs>>(m);
}

}  // namespace ssm_kernels::selective_scan
