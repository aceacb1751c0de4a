// _add_norm, the sum with a residual followed by RMSNorm or LayerNorm, and its forward and backward operators: Autograd,
// Autocast, Meta and every device.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>

#include "norm/norm_call.h"
#include "torch/schemas.h"

namespace ssm_kernels::norm {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  const std::string add_arguments =
      "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, SymInt? group_size, bool residual_in_fp32, "
      "bool subtract_mean) -> (Tensor normed, Tensor new_residual";
  schemas.def("_add_norm" + add_arguments + ")");
  schemas.kernels("_add_norm_fwd" + add_arguments + ", Tensor rstd, Tensor mean)");
  // grad_residual has the accumulation type; a residual in the dtype of x has the gradient of x. needs_grad: x, residual,
  // weight, bias.
  schemas.kernels(
      "_add_norm_bwd(Tensor grad_normed, Tensor? grad_new_residual, Tensor new_residual, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, SymInt? group_size, bool subtract_mean, bool[4] needs_grad) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)");
}

namespace {

const char* add_name(bool subtract_mean) { return subtract_mean ? "add_layer_norm" : "add_rms_norm"; }

struct AddOutputs {
  Tensor normed, new_residual, rstd, mean;

  auto fields() { return std::tie(normed, new_residual, rstd, mean); }
};

AddOutputs add_fwd(const AddInputs& in) {
  const Tensor& x = in.x;
  const Call call{add_name(in.subtract_mean), x, x, in.weight, in.bias, in.group_size, in.subtract_mean};
  const ArgumentChecks checks = check_call(call, "x");
  checks.parameter("residual", in.residual, kRowAxes, x.sym_sizes());
  check_eps(call.op, in.eps);
  NormFwdParams params;
  params.is_add = true;
  params.eps = in.eps;

  const at::ScalarType kept = is_present(in.residual) ? in.residual->scalar_type() : x.scalar_type();
  AddOutputs outputs;
  outputs.normed = empty_rows(x, x.scalar_type());
  outputs.rstd = empty_statistics(call);
  outputs.new_residual = empty_rows(x, in.residual_in_fp32 ? checks.accumulate() : kept);
  outputs.mean = in.subtract_mean ? empty_statistics(call) : nothing(call);
  Rows rows(call.op);
  rows.add(x, Access::kRead, "x", params.x);
  rows.add(in.residual, Access::kRead, "residual", params.residual);
  rows.add(outputs.normed, Access::kWrite, "normed", params.out);
  rows.add(outputs.new_residual, Access::kWrite, "new_residual", params.new_residual);
  run_fwd(call, params, rows, outputs.rstd, outputs.mean, {});
  return outputs;
}

// In the order of _add_norm's tensors.
enum AddGrad { kAddGradX, kAddGradResidual, kAddGradWeight, kAddGradBias, kNumAddGrads };
using AddGrads = std::array<Tensor, kNumAddGrads>;

struct AddNodeInputs : AddInputs {
  // Properties of x and the residual, for backward, which has neither.
  at::ScalarType x_dtype = at::kFloat, residual_dtype = at::kFloat;
  bool has_residual = false;
};

struct AddBwdInputs {
  Tensor grad_normed;
  OptionalTensor grad_new_residual;
  AddNodeInputs in;
  Tensor new_residual, mean, rstd;
  std::array<bool, kNumAddGrads> needs_grad{};

  auto grads() { return std::tie(grad_normed, grad_new_residual); }
  auto saved() { return std::tie(new_residual, rstd, mean); }
  auto fields() {
    return std::tie(grad_normed, grad_new_residual, new_residual, in.weight, in.bias, mean, rstd, in.group_size,
                    in.subtract_mean, needs_grad);
  }
};

// The gradient of x has the dtype of grad_normed, and that of the residual the accumulation type. A residual in the dtype of x
// has the same gradient as x.
AddGrads add_bwd(const AddBwdInputs& bwd) {
  const Tensor& like = bwd.grad_normed;
  const AddInputs& in = bwd.in;
  const Call call{add_name(in.subtract_mean), bwd.new_residual, like, in.weight, in.bias, in.group_size, in.subtract_mean};
  const ArgumentChecks checks = check_call(call, "grad_normed");
  checks.parameter("new_residual", bwd.new_residual, kRowAxes, like.sym_sizes());
  checks.tensor("grad_new_residual", bwd.grad_new_residual, kRowAxes, like.sym_sizes(), bwd.new_residual.scalar_type());
  check_statistics(call, checks, bwd.mean, bwd.rstd);
  NormBwdParams params;
  params.is_add = true;

  const auto rows_or_nothing = [&](AddGrad grad, at::ScalarType dtype) {
    return bwd.needs_grad[grad] ? empty_rows(like, dtype) : nothing(call);
  };
  AddGrads grads = {rows_or_nothing(kAddGradX, like.scalar_type()), rows_or_nothing(kAddGradResidual, checks.accumulate()),
                    empty_gradient(call, in.weight, bwd.needs_grad[kAddGradWeight]),
                    empty_gradient(call, in.bias, bwd.needs_grad[kAddGradBias])};
  Rows rows(call.op);
  rows.add(bwd.new_residual, Access::kRead, "new_residual", params.x);
  rows.add(like, Access::kRead, "grad_normed", params.grad_out);
  rows.add(bwd.grad_new_residual, Access::kRead, "grad_new_residual", params.grad_new_residual);
  if (bwd.needs_grad[kAddGradX]) rows.add(grads[kAddGradX], Access::kWrite, "grad_x", params.grad_x);
  if (bwd.needs_grad[kAddGradResidual]) {
    rows.add(grads[kAddGradResidual], Access::kWrite, "grad_residual", params.grad_residual);
  }
  run_bwd(call, params, rows, bwd.rstd, bwd.mean, {}, grads[kAddGradWeight], grads[kAddGradBias]);
  return grads;
}

// The node saves the new residual, which is a result, the parameters, rstd and mean.
struct AddNorm : DifferentiableOp<AddNorm, AddBwdInputs, std::tuple<Tensor, Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_add_norm", kBackward[] = "ssm_kernels::_add_norm_bwd";

  static const char* name(const AddNodeInputs& in) { return add_name(in.subtract_mean); }

  static auto differentiable(AddNodeInputs& in) { return std::tie(in.x, in.residual, in.weight, in.bias); }

  static Result forward(AddNodeInputs& in, variable_list* saved) {
    static const Operator<AddOutputs, AddInputs> op("ssm_kernels::_add_norm_fwd");
    AddOutputs outputs = op(in);
    if (saved != nullptr) {
      in.x_dtype = in.x.scalar_type();
      in.has_residual = is_present(in.residual);
      in.residual_dtype = in.has_residual ? in.residual->scalar_type() : in.x_dtype;
      *saved = {outputs.new_residual, outputs.rstd, outputs.mean};
    }
    return {outputs.normed, outputs.new_residual};
  }

  static auto saved_fields(Inputs& in) {
    return std::tie(in.weight, in.bias, in.group_size, in.subtract_mean, in.x_dtype, in.residual_dtype, in.has_residual);
  }

  static NeedsGrad has_edges(AddNodeInputs& in) { return {true, in.has_residual, is_present(in.weight), is_present(in.bias)}; }

  static AddGrads backward(AddBwdInputs& bwd) {
    const AddNodeInputs& in = bwd.in;
    if (!bwd.grad_normed.defined()) {
      // The parameters have no part in new_residual; their gradients stay undefined.
      AddGrads computed;
      if (bwd.needs_grad[kAddGradX]) computed[kAddGradX] = bwd.grad_new_residual->to(in.x_dtype);
      if (bwd.needs_grad[kAddGradResidual]) computed[kAddGradResidual] = bwd.grad_new_residual->to(in.residual_dtype);
      return computed;
    }
    const bool is_shared = in.residual_dtype == in.x_dtype;  // one gradient for both
    if (is_shared) {
      bwd.needs_grad[kAddGradX] = bwd.needs_grad[kAddGradX] || bwd.needs_grad[kAddGradResidual];
      bwd.needs_grad[kAddGradResidual] = false;
    }
    AddGrads computed = DifferentiableOp::backward(bwd);
    if (is_shared) computed[kAddGradResidual] = computed[kAddGradX];
    return computed;
  }

  static void cast(AddNodeInputs& in, const Autocast& to) {
    to.to_float_unless(in.x.scalar_type(), in.residual, in.weight, in.bias);
  }
};

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(AddNorm)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&add_fwd>(m, "_add_norm_fwd");
  implement<&add_bwd>(m, "_add_norm_bwd");
}

}  // namespace ssm_kernels::norm
