// _norm_gated, RMSNorm and LayerNorm with a gate, and its forward and backward operators: Autograd, Autocast, Meta and every
// device.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <utility>

#include "norm/norm_call.h"
#include "torch/choices.h"
#include "torch/schemas.h"

namespace ssm_kernels::norm {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // Both norms, differentiable; and forward alone, with rstd and mean of each row's groups. RMSNorm's mean has no elements.
  const std::string gated_arguments =
      "(Tensor x, Tensor? weight, Tensor? z, Tensor? bias, float eps, SymInt? group_size, bool norm_before_gate, "
      "str activation, bool subtract_mean";
  schemas.def("_norm_gated" + gated_arguments + ") -> Tensor");
  // mean_square, (rows, groups) in the accumulation type, takes the place of the mean over a group of v^2.
  schemas.kernels("_norm_gated_fwd" + gated_arguments +
                  ", Tensor? mean_square=None) -> (Tensor out, Tensor rstd, Tensor mean)");
  // Its adjoint. Gradients that are absent or not needed have no elements; needs_grad: x, weight, z, bias. mean_product takes
  // the place of the mean over a group of gy weight y.
  const std::string gated_bwd_arguments =
      "(Tensor grad_out, Tensor x, Tensor? weight, Tensor? z, Tensor? bias, Tensor mean, Tensor rstd, SymInt? group_size, "
      "bool norm_before_gate, str activation, bool subtract_mean, ";
  schemas.kernels("_norm_gated_bwd" + gated_bwd_arguments +
                  "bool[4] needs_grad, Tensor? mean_product=None) -> "
                  "(Tensor grad_x, Tensor grad_weight, Tensor grad_z, Tensor grad_bias)");
  // The same into buffers, which may be column slices of wider tensors. needs_grad: weight, bias. `out` gets the
  // result of _norm_gated_fwd with `eps` once more, with the same bits.
  schemas.kernels("_norm_gated_bwd_out" + gated_bwd_arguments +
                  "bool[2] needs_grad, Tensor(a!)? grad_x, Tensor(b!)? grad_z, Tensor? mean_product=None, "
                  "Tensor(c!)? out=None, float eps=0) -> (Tensor grad_weight, Tensor grad_bias)");
  // For an RMSNorm whose groups are on several devices: the sums, (rows, groups) in the accumulation type, of v^2 and of
  // gy weight y. The z of the first is a gate before the norm.
  schemas.kernels("_norm_gated_squares(Tensor x, Tensor? z, SymInt? group_size, str activation) -> Tensor");
  schemas.kernels(
      "_norm_gated_products(Tensor grad_out, Tensor x, Tensor? weight, Tensor? z, Tensor rstd, SymInt? group_size, "
      "bool norm_before_gate, str activation) -> Tensor");
}

namespace {

constexpr std::string_view kActivationNames[] = {"silu", "gelu", "gelu_tanh", "sigmoid", "none"};

GateActivation parse_activation(const char* op, std::string_view name) {
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<GateActivation>(i);
  }
  raise_unknown_choice(op, "activation", name, kActivationNames);
}

const char* gated_name(bool subtract_mean) { return subtract_mean ? "layer_norm_gated" : "rms_norm_gated"; }

Call call_of(const GatedInputs& in) {
  return {gated_name(in.subtract_mean), in.x, in.x, in.weight, in.bias, in.group_size, in.subtract_mean};
}

GatedOutputs gated_fwd(const GatedFwdInputs& in) {
  const Call call = call_of(in);
  const ArgumentChecks checks = check_call(call, "x");
  checks.tensor("z", in.z, kRowAxes, in.x.sym_sizes(), in.x.scalar_type());
  check_group_mean(call, checks, "mean_square", in.mean_square);
  check_eps(call.op, in.eps);
  NormFwdParams params;
  params.activation = parse_activation(call.op, in.activation);
  params.norm_before_gate = in.norm_before_gate;
  params.eps = in.eps;

  GatedOutputs outputs;
  outputs.out = empty_rows(in.x, in.x.scalar_type());
  outputs.rstd = empty_statistics(call);
  outputs.mean = in.subtract_mean ? empty_statistics(call) : nothing(call);
  Rows rows(call.op);
  rows.add(in.x, Access::kRead, "x", params.x);
  rows.add(in.z, Access::kRead, "z", params.z);
  rows.add(outputs.out, Access::kWrite, "out", params.out);
  run_fwd(call, params, rows, outputs.rstd, outputs.mean, in.mean_square);
  return outputs;
}

Tensor gated_squares(const SquaresInputs& in) {
  const OptionalTensor none;
  const Call call{gated_name(false), in.x, in.x, none, none, in.group_size, false};
  check_call(call, "x").tensor("z", in.z, kRowAxes, in.x.sym_sizes(), in.x.scalar_type());
  NormFwdParams params;
  params.activation = parse_activation(call.op, in.activation);
  Rows rows(call.op);
  rows.add(in.x, Access::kRead, "x", params.x);
  rows.add(in.z, Access::kRead, "z", params.z);
  return run_fwd_sums(call, params, rows);
}

// Writes to grad_x, grad_z and out if they are present.
GatedParameterGrads gated_bwd_out(const GatedBwdOutInputs& bwd) {
  const GatedInputs& in = bwd.in;
  const Tensor& x = in.x;
  const Call call = call_of(in);
  const ArgumentChecks checks = check_call(call, "x");
  for (const auto& [name, tensor] : {std::pair<const char*, const OptionalTensor&>("z", in.z),
                                     {"grad_x", bwd.grad_x},
                                     {"grad_z", bwd.grad_z},
                                     {"out", bwd.out}}) {
    checks.tensor(name, tensor, kRowAxes, x.sym_sizes(), x.scalar_type());
  }
  TORCH_CHECK_VALUE(!is_present(bwd.grad_z) || is_present(in.z), call.op,
                    ": expected z, whose gradient is asked for, got None");
  checks.tensor("grad_out", bwd.grad_out, kRowAxes, x.sym_sizes(), x.scalar_type());
  check_statistics(call, checks, bwd.mean, bwd.rstd);
  check_group_mean(call, checks, "mean_product", bwd.mean_product);
  NormBwdParams params;
  params.activation = parse_activation(call.op, in.activation);
  params.norm_before_gate = in.norm_before_gate;
  params.eps = bwd.eps;
  TORCH_CHECK_VALUE(!is_present(bwd.out) || !is_present(bwd.mean_product), call.op,
                    ": expected no mean_product with out, whose groups are on one device");
  GatedParameterGrads grads = {empty_gradient(call, in.weight, bwd.needs_parameter_grad[0]),
                               empty_gradient(call, in.bias, bwd.needs_parameter_grad[1])};
  Rows rows(call.op);
  rows.add(x, Access::kRead, "x", params.x);
  rows.add(in.z, Access::kRead, "z", params.z);
  rows.add(bwd.grad_out, Access::kRead, "grad_out", params.grad_out);
  rows.add(bwd.grad_x, Access::kWrite, "grad_x", params.grad_x);
  rows.add(bwd.grad_z, Access::kWrite, "grad_z", params.grad_z);
  rows.add(bwd.out, Access::kWrite, "out", params.out);
  run_bwd(call, params, rows, bwd.rstd, bwd.mean, bwd.mean_product, grads[0], grads[1]);
  return grads;
}

Tensor gated_products(const ProductsInputs& in) {
  const OptionalTensor none;
  const Call call{gated_name(false), in.x, in.x, in.weight, none, in.group_size, false};
  const ArgumentChecks checks = check_call(call, "x");
  checks.tensor("z", in.z, kRowAxes, in.x.sym_sizes(), in.x.scalar_type());
  checks.tensor("grad_out", in.grad_out, kRowAxes, in.x.sym_sizes(), in.x.scalar_type());
  check_statistics(call, checks, {}, in.rstd);
  NormBwdParams params;
  params.activation = parse_activation(call.op, in.activation);
  params.norm_before_gate = in.norm_before_gate;
  Rows rows(call.op);
  rows.add(in.x, Access::kRead, "x", params.x);
  rows.add(in.z, Access::kRead, "z", params.z);
  rows.add(in.grad_out, Access::kRead, "grad_out", params.grad_out);
  return run_bwd_sums(call, params, rows, in.rstd);
}

// In the order of _norm_gated's tensors.
enum GatedGrad { kGradX, kGradWeight, kGradZ, kGradBias, kNumGrads };
using GatedGrads = std::array<Tensor, kNumGrads>;

// Allocates the gradients that _norm_gated_bwd_out has memory for.
struct GatedBwdInputsOfAll : GatedBwdOutInputs {
  std::array<bool, kNumGrads> needs_grad{};

  auto fields() { return std::tuple_cat(GatedBwdInputs::common_fields(), std::tie(needs_grad, mean_product)); }
};

GatedGrads gated_bwd(GatedBwdInputsOfAll& bwd) {
  const GatedInputs& in = bwd.in;
  const Call call = call_of(in);
  check_call(call, "x");
  bwd.needs_parameter_grad = {bwd.needs_grad[kGradWeight], bwd.needs_grad[kGradBias]};
  if (bwd.needs_grad[kGradX]) bwd.grad_x = empty_rows(in.x, in.x.scalar_type());
  if (bwd.needs_grad[kGradZ] && is_present(in.z)) bwd.grad_z = empty_rows(in.x, in.x.scalar_type());
  auto [grad_weight, grad_bias] = gated_bwd_out(bwd);
  const auto or_nothing = [&](const OptionalTensor& grad) { return is_present(grad) ? *grad : nothing(call); };
  return {or_nothing(bwd.grad_x), grad_weight, or_nothing(bwd.grad_z), grad_bias};
}

// The node saves the inputs, rstd and mean.
struct NormGated : DifferentiableOp<NormGated, GatedBwdInputsOfAll, Tensor> {
  static constexpr char kSchema[] = "ssm_kernels::_norm_gated", kBackward[] = "ssm_kernels::_norm_gated_bwd";

  static const char* name(const GatedInputs& in) { return gated_name(in.subtract_mean); }

  static auto differentiable(GatedInputs& in) { return in.tensors(); }

  static Tensor forward(const GatedInputs& in, variable_list* saved) {
    static const Operator<GatedOutputs, GatedFwdInputs> op("ssm_kernels::_norm_gated_fwd");
    GatedOutputs outputs = op(GatedFwdInputs{in, {}});
    if (saved != nullptr) *saved = {outputs.rstd, outputs.mean};
    return outputs.out;
  }

  static auto saved_fields(Inputs& in) { return std::tuple_cat(in.tensors(), in.options()); }

  static void cast(GatedInputs& in, const Autocast& to) {
    to.to_float_unless(in.x.scalar_type(), in.weight, in.bias);
    to.to(in.x.scalar_type(), in.z);
  }
};

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(NormGated)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&gated_fwd>(m, "_norm_gated_fwd");
  implement<&gated_bwd>(m, "_norm_gated_bwd");
  implement<&gated_bwd_out>(m, "_norm_gated_bwd_out");
  implement<&gated_squares>(m, "_norm_gated_squares");
  implement<&gated_products>(m, "_norm_gated_products");
}

}  // namespace ssm_kernels::norm
