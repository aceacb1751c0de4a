// The adjoint of the summary of a span of steps. The summary's results are those of two scans:
//
//   last_state   the last state of the scan, begun with zero
//   decay        the last state of the scan with the same a and with b = 0, begun with one
//
// and its adjoint is made of the adjoints of these in the accumulation type: only results are rounded. A reset makes the decay
// zero, whatever the inputs are.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <vector>

#include "linear_scan/linear_scan_op.h"
#include "torch/batched_gradients.h"
#include "torch/checks.h"
#include "torch/schemas.h"

namespace ssm_kernels::linear_scan {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The summary of any of them: the last state from zero, and the product of all a, zero where a reset is. And its adjoint.
  const std::string summary_arguments =
      "Tensor[] inputs, Tensor? cu_seqlens, Tensor? reset, str recurrence, str candidate_activation, bool gate_is_logit, "
      "bool reverse";
  schemas.def("_linear_recurrence_summary(" + summary_arguments + ") -> (Tensor last_state, Tensor decay)");
  schemas.kernels("_linear_recurrence_summary_fwd(" + summary_arguments + ") -> (Tensor last_state, Tensor decay)");
  schemas.kernels("_linear_recurrence_summary_bwd(Tensor? grad_last_state, Tensor? grad_decay, " + summary_arguments +
                  ", bool[4] needs_grad) -> (Tensor grad_0, Tensor grad_1, Tensor grad_2, Tensor grad_3)");

  for (const char* name : {"_linear_recurrence_summary", "_linear_recurrence_summary_bwd"}) {
    implement_boxed<&call_each_sample>(library, name, at::DispatchKey::Batched);
  }
}

namespace {

const Operator<FwdOutputs, Inputs>& fwd_of_scan() {
  static const Operator<FwdOutputs, Inputs> op("ssm_kernels::_linear_recurrence_fwd");
  return op;
}

// The scan whose last state is the summary's.
Inputs scan_from_zero(const SummaryInputs& in, const RecurrenceRow& row) {
  Inputs scan = in;
  scan.recurrence = row.name;
  return scan;
}

// The scan whose last state is the product of all a; `inputs` is the memory of its list of tensors.
Inputs scan_of_decays(const SummaryInputs& in, const RecurrenceRow& row, std::vector<at::Tensor>& inputs) {
  const at::Tensor& first = in.tensors[0];
  inputs = in.tensors.vec();
  inputs[row.candidate] = at::full_like(inputs[row.candidate], row.zero_candidate);
  Inputs scan = scan_from_zero(in, row);
  scan.tensors = inputs;
  scan.candidate_activation = "none";
  scan.reset.reset();
  const at::TensorOptions options = first.options().dtype(accumulate_type(first.scalar_type()));
  scan.h0 = at::ones_symint({in.sequences(), first.sym_size(2)}, options);
  return scan;
}

// Zero where a sequence begins in a row of the batch.
at::Tensor zero_where_reset(const at::Tensor& states, const OptionalTensor& reset) {
  return is_present(reset) ? states.masked_fill(reset->any(1, /*keepdim=*/true), 0) : states;
}

// The gradients of the scan's inputs, from the gradient of its last state.
GradTensors adjoint_of(const Inputs& scan, const at::Tensor& grad_last_state, const NeedsGrad& needs_grad) {
  static const Operator<GradTensors, BwdInputs> op("ssm_kernels::_linear_recurrence_bwd");
  BwdInputs bwd;
  bwd.grad_last_state = grad_last_state;
  bwd.in = scan;
  bwd.h = fwd_of_scan()(scan).h;
  bwd.needs_grad = needs_grad;
  return op(bwd);
}

}  // namespace

SummaryGrads summary_adjoint(const SummaryBwdInputs& bwd) {
  const RecurrenceRow& row = *check_inputs(bwd.in).row;
  SummaryGrads grads = allocate_summary_bwd(bwd);
  std::vector<at::Tensor> wide;
  for (const at::Tensor& input : bwd.in.tensors) wide.push_back(input.to(accumulate_type(input.scalar_type())));
  SummaryInputs in = bwd.in;
  in.tensors = wide;
  NeedsGrad needs_grad{};
  std::copy(bwd.needs_grad.begin(), bwd.needs_grad.end(), needs_grad.begin());
  GradTensors from_state, from_decay;
  if (is_present(bwd.grad_last_state)) {
    from_state = adjoint_of(scan_from_zero(in, row), *bwd.grad_last_state, needs_grad);
  }
  if (is_present(bwd.grad_decay)) {
    needs_grad[row.candidate] = false;
    std::vector<at::Tensor> inputs;
    const at::Tensor grad_decay = zero_where_reset(*bwd.grad_decay, in.reset);
    from_decay = adjoint_of(scan_of_decays(in, row, inputs), grad_decay, needs_grad);
  }
  for (size_t i = 0; i < wide.size(); ++i) {
    if (!bwd.needs_grad[i]) continue;
    const bool has_second = from_decay[i].defined() && i != row.candidate;
    if (from_state[i].defined()) {
      grads[i].copy_(has_second ? from_state[i].add_(from_decay[i]) : from_state[i]);
    } else if (has_second) {
      grads[i].copy_(from_decay[i]);
    } else {
      grads[i].zero_();
    }
  }
  return grads;
}

}  // namespace ssm_kernels::linear_scan
