#include "ssd/aten/step_sizes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>

#include <cmath>
#include <limits>

#include "common/limits.h"
#include "torch/checks.h"
#include "torch/tensor_math.h"

namespace ssm_kernels::ssd {
namespace {

constexpr double kSoftplusBeta = 1, kSoftplusThreshold = 20;

// The limits as numbers of the dtype: PyTorch refuses finite scalars beyond it.
DtLimit limits_of(const Inputs& in, at::ScalarType dtype) {
  const double largest = dtype == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const auto limit = [&](double value) {
    return std::abs(value) > largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : value;
  };
  const auto [min, max] = kernel_dt_limit(in.dt_min, in.dt_max);
  return {limit(min), limit(max)};
}

}  // namespace

Steps make_step_sizes(const Inputs& in, const at::Tensor& dt) {
  Steps steps;
  steps.biased = dt.to(accumulate_type(dt.scalar_type()));
  if (is_present(in.dt_bias)) steps.biased = steps.biased + *in.dt_bias;
  steps.unclamped = in.dt_softplus ? at::softplus(steps.biased, kSoftplusBeta, kSoftplusThreshold) : steps.biased;
  const auto [dt_min, dt_max] = limits_of(in, steps.unclamped.scalar_type());
  steps.size = at::clamp(steps.unclamped, dt_min, dt_max);
  return steps;
}

at::Tensor biased_grads(const Inputs& in, const Steps& steps, at::Tensor grad_size) {
  const auto [dt_min, dt_max] = limits_of(in, steps.unclamped.scalar_type());
  const at::Tensor is_clamped = steps.unclamped.lt(dt_min).logical_or_(steps.unclamped.gt(dt_max));
  const at::Tensor grad = grad_size.masked_fill_(is_clamped, 0);
  if (!in.dt_softplus) return grad;
  return at::softplus_backward(grad, steps.biased.to(at::kDouble), kSoftplusBeta, kSoftplusThreshold);
}

at::Tensor through_decay(const Inputs& in, const at::Tensor& grad_zeta) {
  // From this rate on every state has decayed to zero, and so is the gradient through the decay.
  const at::Tensor A = in.A->to(at::kDouble);
  const double largest = in.A->scalar_type() == at::kDouble ? kLargestRate<double> : kLargestRate<float>;
  return (grad_zeta * A).masked_fill_(A.abs() >= largest, 0);
}

at::Tensor log_decay_of_all_steps(const Inputs& in) {
  if (is_present(in.log_decay)) return in.log_decay->sum(1, /*keepdim=*/false, at::kDouble);
  return make_step_sizes(in, *in.dt).size.sum(1, /*keepdim=*/false, at::kDouble) * in.A->to(at::kDouble);
}

Steps make_steps(const Inputs& in, Discretization method, c10::function_ref<at::Tensor(const at::Tensor&)> read) {
  if (is_present(in.log_decay)) {
    Steps steps;
    steps.zeta = read(*in.log_decay).to(at::kDouble);
    const at::TensorOptions options = wide_options(in.x);
    steps.gain = is_present(in.gain) ? read(*in.gain).to(options) : at::ones_like(steps.zeta, options);
    return steps;
  }
  const at::Tensor dt = read(*in.dt);
  Steps steps = make_step_sizes(in, dt);
  steps.size = steps.size.to(at::kDouble);
  steps.zeta = steps.size * in.A->to(at::kDouble);
  visit_discretization(method, [&](auto rule) {
    const TensorValue zeta(steps.zeta);
    steps.gain = (steps.size * current_gain(rule, zeta, rule.basis(zeta)).tensor).to(accumulate_type(dt.scalar_type()));
  });
  return steps;
}

StepGrads step_grads(const Inputs& in, Discretization method, const Steps& steps, const at::Tensor& grad_zeta,
                     const at::Tensor& grad_gain) {
  StepGrads grads;
  if (is_present(in.log_decay)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    grads.log_decay = grad_zeta.to(at::kDouble).masked_fill(steps.zeta.eq(-kInfinity), 0);
    grads.gain = grad_gain.to(at::kDouble);
    return grads;
  }
  at::Tensor grad_size;
  visit_discretization(method, [&](auto rule) {
    const TensorValue zeta(steps.zeta), basis = rule.basis(zeta);
    const auto derivatives = rule.derivatives(zeta, basis, current_gain(rule, zeta, basis));
    // c = d k(d A): its derivative by d is (z k)', by A it is d^2 k'.
    grad_size = through_decay(in, grad_zeta) + grad_gain * derivatives.z_gain.tensor;
    const at::Tensor grad_A = (grad_zeta + grad_gain * steps.size * derivatives.gain.tensor) * steps.size;
    grads.A = grad_A.flatten(0, -2).sum(0);
  });
  grads.biased = biased_grads(in, steps, grad_size);
  return grads;
}

}  // namespace ssm_kernels::ssd
