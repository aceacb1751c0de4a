// _add_norm, the sum with a residual and its RMSNorm or LayerNorm, and its forward and backward kernels: Autograd, Autocast,
// Meta and every device.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "norm/norm_call.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"

namespace ssm_kernels::norm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const char* add_name(bool subtract_mean) { return subtract_mean ? "add_layer_norm" : "add_rms_norm"; }

template <bool meta>
Four add_fwd(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
             double eps, OptionalSize group_size, bool residual_in_fp32, bool subtract_mean) {
  const Call call{add_name(subtract_mean), x, x, weight, bias, group_size, subtract_mean};
  const ArgumentChecks checks = check_call(call, "x");
  if (is_present(residual)) {
    checks.shape("residual", *residual, kRowAxes, x.sym_sizes());
    checks.dtype_or_accumulate("residual", *residual);
    checks.device("residual", *residual);
  }
  check_eps(call.op, eps);
  NormFwdParams params;
  params.is_add = true;
  params.eps = eps;

  const at::ScalarType kept = is_present(residual) ? residual->scalar_type() : x.scalar_type();
  const Tensor out = empty_rows(x, x.scalar_type()), rstd = empty_statistics(call);
  const Tensor new_residual = empty_rows(x, residual_in_fp32 ? checks.accumulate() : kept);
  const Tensor mean = subtract_mean ? empty_statistics(call) : nothing(call);
  if constexpr (!meta) {
    Rows rows(call.op);
    rows.add(x, Access::kRead, "x", params.x);
    rows.add(residual, Access::kRead, "residual", params.residual);
    rows.add(out, Access::kWrite, "normed", params.out);
    rows.add(new_residual, Access::kWrite, "new_residual", params.new_residual);
    run_fwd(call, params, rows, rstd, mean);
  }
  return {out, new_residual, rstd, mean};
}

// grad_x has the dtype of grad_normed, grad_residual the accumulation type: the gradient of a residual in the dtype of x is
// grad_x. needs_grad: x, residual, weight, bias.
template <bool meta>
Four add_bwd(const Tensor& grad_normed, const OptionalTensor& grad_new_residual, const Tensor& new_residual,
             const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd,
             OptionalSize group_size, bool subtract_mean, FourFlags needs_grad) {
  const Call call{add_name(subtract_mean), new_residual, grad_normed, weight, bias, group_size, subtract_mean};
  const ArgumentChecks checks = check_call(call, "grad_normed");
  checks.shape("new_residual", new_residual, kRowAxes, grad_normed.sym_sizes());
  checks.dtype_or_accumulate("new_residual", new_residual);
  checks.device("new_residual", new_residual);
  checks.tensor("grad_new_residual", grad_new_residual, kRowAxes, grad_normed.sym_sizes(), new_residual.scalar_type());
  check_statistics(call, checks, mean, rstd);
  NormBwdParams params;
  params.is_add = true;

  OptionalTensor grad_x, grad_residual;
  if (needs_grad[0]) grad_x = empty_rows(grad_normed, grad_normed.scalar_type());
  if (needs_grad[1]) grad_residual = empty_rows(grad_normed, checks.accumulate());
  const Tensor grad_weight = empty_gradient(call, weight, needs_grad[2]);
  const Tensor grad_bias = empty_gradient(call, bias, needs_grad[3]);
  if constexpr (!meta) {
    Rows rows(call.op);
    rows.add(new_residual, Access::kRead, "new_residual", params.x);
    rows.add(grad_normed, Access::kRead, "grad_normed", params.grad_out);
    rows.add(grad_new_residual, Access::kRead, "grad_new_residual", params.grad_new_residual);
    rows.add(grad_x, Access::kWrite, "grad_x", params.grad_x);
    rows.add(grad_residual, Access::kWrite, "grad_residual", params.grad_residual);
    run_bwd(call, params, rows, rstd, mean, grad_weight, grad_bias);
  }
  return {grad_x.has_value() ? *grad_x : nothing(call), grad_residual.has_value() ? *grad_residual : nothing(call), grad_weight,
          grad_bias};
}

const auto& add_fwd_op() {
  static const auto op = find_op<decltype(add_fwd<true>)>("ssm_kernels::_add_norm_fwd");
  return op;
}

std::tuple<Tensor, Tensor> add_no_grad(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                       const OptionalTensor& bias, double eps, OptionalSize group_size, bool residual_in_fp32,
                                       bool subtract_mean) {
  auto results = add_fwd_op().call(x, residual, weight, bias, eps, group_size, residual_in_fp32, subtract_mean);
  return {std::get<0>(results), std::get<1>(results)};
}

// Saves the new residual, which is a result, the parameters, rstd and mean.
class AddNorm : public torch::autograd::Function<AddNorm> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps, OptionalSize group_size,
                               bool residual_in_fp32, bool subtract_mean) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [normed, new_residual, rstd, mean] =
        add_fwd_op().call(x, residual, weight, bias, eps, group_size, residual_in_fp32, subtract_mean);
    ctx->save_for_backward({new_residual, or_undefined(weight), or_undefined(bias), mean, rstd});
    if (group_size.has_value()) ctx->saved_data["group_size"] = *group_size;
    ctx->saved_data["subtract_mean"] = subtract_mean;
    ctx->saved_data["x_dtype"] = x.scalar_type();
    if (is_present(residual)) ctx->saved_data["residual_dtype"] = residual->scalar_type();
    ctx->set_materialize_grads(false);
    return {normed, new_residual};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    constexpr size_t kNumArguments = 8;  // of forward, after ctx
    variable_list result(kNumArguments);
    const Tensor &grad_normed = grads[0], &grad_new_residual = grads[1];
    if (!grad_normed.defined() && !grad_new_residual.defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const bool has_residual = ctx->saved_data.count("residual_dtype") > 0;
    const FourFlags needs_grad = needed_gradients(ctx, {true, has_residual, saved[1].defined(), saved[2].defined()});
    const at::ScalarType x_dtype = ctx->saved_data["x_dtype"].toScalarType();
    const at::ScalarType residual_dtype = has_residual ? ctx->saved_data["residual_dtype"].toScalarType() : x_dtype;
    if (!grad_normed.defined()) {
      if (needs_grad[0]) result[0] = grad_new_residual.to(x_dtype);
      if (needs_grad[1]) result[1] = grad_new_residual.to(residual_dtype);
      return result;
    }
    OptionalSize group_size;
    if (ctx->saved_data.count("group_size") > 0) group_size = ctx->saved_data["group_size"].toSymInt();
    const bool is_same = residual_dtype == x_dtype;  // one gradient for both
    static const auto op = find_op<decltype(add_bwd<true>)>("ssm_kernels::_add_norm_bwd");
    const auto [grad_x, grad_residual, grad_weight, grad_bias] =
        op.call(grad_normed, or_absent(grad_new_residual), saved[0], or_absent(saved[1]), or_absent(saved[2]), saved[3],
                saved[4], group_size, ctx->saved_data["subtract_mean"].toBool(),
                {needs_grad[0] || (is_same && needs_grad[1]), !is_same && needs_grad[1], needs_grad[2], needs_grad[3]});
    if (needs_grad[0]) result[0] = grad_x;
    if (needs_grad[1]) result[1] = is_same ? grad_x : grad_residual;
    if (needs_grad[2]) result[2] = grad_weight;
    if (needs_grad[3]) result[3] = grad_bias;
    return result;
  }
};

std::tuple<Tensor, Tensor> add_autograd(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, OptionalSize group_size, bool residual_in_fp32,
                                        bool subtract_mean) {
  check_no_func_transform(add_name(subtract_mean));
  if (!is_recorded({&residual, &weight, &bias}, x)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return add_no_grad(x, residual, weight, bias, eps, group_size, residual_in_fp32, subtract_mean);
  }
  auto results = AddNorm::apply(x, residual, weight, bias, eps, group_size, residual_in_fp32, subtract_mean);
  return {results[0], results[1]};
}

template <at::DeviceType device_type>
std::tuple<Tensor, Tensor> add_autocast(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, OptionalSize group_size, bool residual_in_fp32,
                                        bool subtract_mean) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  static const auto op = find_op<AddSignature>("ssm_kernels::_add_norm");
  const auto legal = [&](const OptionalTensor& tensor) { return as_legal<device_type>(tensor, x.scalar_type()); };
  return op.call(x, legal(residual), legal(weight), legal(bias), eps, std::move(group_size), residual_in_fp32, subtract_mean);
}

template <bool meta>
void implement_add_kernels(torch::Library& m) {
  m.impl("_add_norm_fwd", &add_fwd<meta>);
  m.impl("_add_norm_bwd", &add_bwd<meta>);
}

constexpr const char* kAddKernels[] = {"_add_norm_fwd", "_add_norm_bwd"};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) { m.impl("_add_norm", &add_autocast<at::kCPU>); }

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) { m.impl("_add_norm", &add_autocast<at::kCUDA>); }

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("_add_norm", &add_no_grad); }

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_add_norm", &add_autograd);
  for (const char* name : kAddKernels) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement_add_kernels<true>(m); }

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement_add_kernels<false>(m); }

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
#ifdef SSM_KERNELS_WITH_CUDA
  implement_add_kernels<false>(m);
#else
  for (const char* name : kAddKernels) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#endif
}

}  // namespace ssm_kernels::norm
