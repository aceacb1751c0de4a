#include "delta_rule/aten/gates.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>

#include "common/delta_gates.h"
#include "torch/checks.h"

namespace ssm_kernels::delta_rule {
namespace {

constexpr double kSoftplusBeta = 1, kSoftplusThreshold = 20;

at::ScalarType gate_type(const Inputs& in) {
  return in.has_gate_per_channel() ? accumulate_type(in.q.scalar_type()) : at::kDouble;
}

// A parameter of heads as it multiplies or is added to a gate.
at::Tensor of_heads(const Inputs& in, const at::Tensor& parameter) {
  const at::Tensor values = parameter.to(gate_type(in));
  return in.has_gate_per_channel() && values.dim() == 1 ? values.unsqueeze(-1) : values;
}

at::Tensor biased(const Inputs& in, const at::Tensor& raw) {
  const at::Tensor values = raw.to(gate_type(in));
  return is_present(in.dt_bias) ? values + of_heads(in, *in.dt_bias) : values;
}

}  // namespace

NormalizedRows normalized(const Inputs& in, const at::Tensor& rows) {
  if (!in.qk_l2norm) return {rows, {}};
  const at::Tensor factor = (rows * rows).sum(-1, /*keepdim=*/true).add_(kNormEpsilon).rsqrt_();
  return {rows * factor, factor};
}

at::Tensor normalized_adjoint(const NormalizedRows& of, const at::Tensor& grad) {
  if (!of.factor.defined()) return grad;
  const at::Tensor along = (of.rows * grad).sum(-1, /*keepdim=*/true);
  return grad.addcmul(of.rows, along, -1).mul_(of.factor);
}

at::Tensor log_decays(const Inputs& in, const at::Tensor& raw) {
  if (!in.has_raw_gate()) return raw.to(gate_type(in));
  const at::Tensor values = biased(in, raw);
  if (in.gate_lower_bound.has_value()) {
    return at::sigmoid(is_present(in.A_log) ? values * of_heads(in, *in.A_log).exp() : values).mul_(*in.gate_lower_bound);
  }
  return at::softplus(values, kSoftplusBeta, kSoftplusThreshold).mul_(of_heads(in, *in.A_log).exp()).neg_();
}

GateGrads log_decays_adjoint(const Inputs& in, const at::Tensor& raw, const at::Tensor& grad) {
  if (!in.has_raw_gate()) return {grad, {}};
  const at::Tensor values = biased(in, raw), typed = grad.to(gate_type(in));
  // A decay of zero has the gradient zero, even where it is the exponential of minus infinity.
  const at::Tensor is_zero = typed.eq(0);
  at::Tensor of_values, of_A_log;
  if (in.gate_lower_bound.has_value()) {
    const at::Tensor rate = is_present(in.A_log) ? of_heads(in, *in.A_log).exp() : at::Tensor();
    const at::Tensor bounded = at::sigmoid(rate.defined() ? values * rate : values);
    of_values = at::sigmoid_backward(typed * *in.gate_lower_bound, bounded);
    if (rate.defined()) {
      of_values = of_values * rate;
      of_A_log = of_values * values;
    }
  } else {
    const at::Tensor of_softplus = typed * of_heads(in, *in.A_log).exp().neg();
    of_values = at::softplus_backward(of_softplus, values, kSoftplusBeta, kSoftplusThreshold);
    of_A_log = of_softplus * at::softplus(values, kSoftplusBeta, kSoftplusThreshold);
  }
  GateGrads grads{of_values.masked_fill(is_zero, 0), {}};
  if (of_A_log.defined()) {
    const at::Tensor by_head = in.has_gate_per_channel() ? of_A_log.masked_fill(is_zero, 0).sum(-1, false, at::kDouble)
                                                         : of_A_log.masked_fill(is_zero, 0);
    grads.A_log = by_head.flatten(0, -2).sum(0, false, at::kDouble);
  }
  return grads;
}

at::Tensor betas(const Inputs& in, const at::Tensor& raw) {
  const at::Tensor values = raw.to(accumulate_type(in.q.scalar_type()));
  if (!in.beta_sigmoid) return values;
  const at::Tensor result = at::sigmoid(values);
  return in.allow_neg_eigval ? result * 2 : result;
}

at::Tensor betas_adjoint(const Inputs& in, const at::Tensor& raw, const at::Tensor& grad) {
  if (!in.beta_sigmoid) return grad;
  return at::sigmoid_backward(in.allow_neg_eigval ? grad * 2 : grad, at::sigmoid(raw.to(grad.scalar_type())));
}

}  // namespace ssm_kernels::delta_rule
