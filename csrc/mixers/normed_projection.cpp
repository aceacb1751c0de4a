#include "mixers/normed_projection.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "mixers/mixer_parameters_op.h"
#include "torch/allocation.h"
#include "torch/dispatch.h"

namespace ssm_kernels::mixers {

at::Tensor NormedProjection::in_rows(const at::Tensor& columns) const { return columns.unflatten_symint(-1, {-1, row_size}); }

norm::GatedInputs NormedProjection::norm_inputs(const at::Tensor& rows) const {
  norm::GatedInputs norm;
  norm.x = rows;
  norm.weight = norm_weight;
  norm.bias = norm_bias;
  if (is_present(z)) norm.z = in_rows(*z);
  norm.eps = eps;
  norm.group_size = group_size;
  norm.norm_before_gate = norm_before_gate;
  norm.activation = activation;
  norm.subtract_mean = subtract_mean;
  return norm;
}

norm::GatedOutputs NormedProjection::normalize(const at::Tensor& y) const {
  static const Operator<norm::GatedOutputs, norm::GatedFwdInputs> op("ssm_kernels::_norm_gated_fwd");
  return op(norm::GatedFwdInputs{norm_inputs(in_rows(y.flatten(-2))), {}});
}

at::Tensor NormedProjection::in_product(const at::Tensor& parameter, const at::Tensor& columns) const {
  return casts_projection ? parameter.to(columns.scalar_type()) : parameter;
}

NormedProjection::Outputs NormedProjection::forward(const at::Tensor& y) const {
  Outputs outputs;
  at::Tensor out = y;
  if (has_norm()) {
    norm::GatedOutputs normed = normalize(y);
    out = normed.out;
    outputs.rstd = normed.rstd;
    outputs.mean = normed.mean;
  } else {
    const at::TensorOptions options = y.options().dtype(accumulate_type(y.scalar_type()));
    outputs.rstd = empty_tensor({0}, options);
    outputs.mean = empty_tensor({0}, options);
  }
  out = out.flatten(-2);
  if (projects()) {
    std::optional<at::Tensor> bias;
    if (is_present(proj_bias)) bias = in_product(*proj_bias, out);
    outputs.out = at::linear(out, in_product(*proj_weight, out), bias);
  } else {
    outputs.out = out;
  }
  return outputs;
}

NormedProjection::Grads NormedProjection::backward(std::optional<at::Tensor> grad_out, at::Tensor y, const at::Tensor& rstd,
                                                   const at::Tensor& mean, const Needs& needs) const {
  Grads grads;
  const bool has_grad_out = is_present(grad_out);
  // The gradients of the out-projection, by the products that autograd takes for torch.nn.functional.linear.
  const auto set_weight_grad = [&, of_out = grad_out](const at::Tensor& projected) {
    grads.proj_weight = in_dtype_of(of_out->flatten(0, -2).t().mm(projected.flatten(-2).flatten(0, -2)), *proj_weight);
  };
  const bool writes_normed = needs.proj_weight && has_grad_out && has_norm() && needs.any_before_projection();
  if (projects() && has_grad_out) {
    const at::Tensor rows = grad_out->flatten(0, -2);
    if (needs.proj_weight && !writes_normed) set_weight_grad(has_norm() ? normalize(y).out : y);
    if (needs.proj_bias) grads.proj_bias = in_dtype_of(rows.sum(0), *proj_bias);
    if (needs.any_before_projection()) {
      c10::SymDimVector sizes(grad_out->sym_sizes().begin(), grad_out->sym_sizes().end());
      sizes.back() = proj_weight->sym_size(1);
      grad_out = rows.mm(in_product(*proj_weight, rows)).view_symint(sizes);
    }
  } else {
    if (needs.proj_weight) grads.proj_weight = at::zeros_like(*proj_weight);
    if (needs.proj_bias) grads.proj_bias = at::zeros_like(*proj_bias);
  }
  if (!needs.any_before_projection()) return grads;

  if (!has_grad_out || !has_norm()) {
    if (needs.z) grads.z = at::zeros_like(*z);
    if (needs.norm_weight) grads.norm_weight = at::zeros_like(*norm_weight);
    if (needs.norm_bias) grads.norm_bias = at::zeros_like(*norm_bias);
    if (has_grad_out) grads.y = *grad_out;
    return grads;
  }
  static const Operator<norm::GatedParameterGrads, norm::GatedBwdOutInputs> op("ssm_kernels::_norm_gated_bwd_out");
  grads.y = empty_contiguous_like(y).flatten(-2);
  if (needs.z) grads.z = empty_contiguous_like(*z);
  norm::GatedBwdOutInputs norm;
  norm.grad_out = in_rows(*grad_out);
  norm.in = norm_inputs(in_rows(y.flatten(-2)));
  norm.mean = mean;
  norm.rstd = rstd;
  norm.needs_parameter_grad = {needs.norm_weight, needs.norm_bias};
  norm.grad_x = in_rows(grads.y);
  if (needs.z) norm.grad_z = in_rows(grads.z);
  at::Tensor normed;
  if (writes_normed) {
    normed = empty_contiguous_like(y);
    norm.out = in_rows(normed.flatten(-2));
  }
  norm.eps = eps;
  auto [grad_weight, grad_bias] = op(norm);
  if (needs.norm_weight) grads.norm_weight = grad_weight;
  if (needs.norm_bias) grads.norm_bias = grad_bias;
  norm = {};
  grad_out.reset();
  y.reset();
  if (writes_normed) set_weight_grad(normed);
  return grads;
}

}  // namespace ssm_kernels::mixers
