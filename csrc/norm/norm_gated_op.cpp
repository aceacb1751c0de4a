// _norm_gated, RMSNorm and LayerNorm with a gate, and its forward and backward kernels: Autograd, Autocast, Meta and every
// device.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>

#include "norm/norm_call.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"

namespace ssm_kernels::norm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kActivationNames[] = {"silu", "gelu", "gelu_tanh", "sigmoid", "none"};

GateActivation parse_activation(const char* op, std::string_view name) {
  std::string known;
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<GateActivation>(i);
    known += (i > 0 ? ", " : "") + std::string(kActivationNames[i]);
  }
  TORCH_CHECK_VALUE(false, op, ": unknown activation '", name, "', expected one of: ", known);
}

const char* gated_name(bool subtract_mean) { return subtract_mean ? "layer_norm_gated" : "rms_norm_gated"; }

template <bool meta>
Three gated_fwd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z, const OptionalTensor& bias, double eps,
                OptionalSize group_size, bool norm_before_gate, std::string_view activation, bool subtract_mean) {
  const Call call{gated_name(subtract_mean), x, x, weight, bias, group_size, subtract_mean};
  const ArgumentChecks checks = check_call(call, "x");
  checks.tensor("z", z, kRowAxes, x.sym_sizes(), x.scalar_type());
  check_eps(call.op, eps);
  NormFwdParams params;
  params.activation = parse_activation(call.op, activation);
  params.norm_before_gate = norm_before_gate;
  params.eps = eps;

  const Tensor out = empty_rows(x, x.scalar_type()), rstd = empty_statistics(call);
  const Tensor mean = subtract_mean ? empty_statistics(call) : nothing(call);
  if constexpr (!meta) {
    Rows rows(call.op);
    rows.add(x, Access::kRead, "x", params.x);
    rows.add(z, Access::kRead, "z", params.z);
    rows.add(out, Access::kWrite, "out", params.out);
    run_fwd(call, params, rows, rstd, mean);
  }
  return {out, rstd, mean};
}

// Both forms of backward. Of the last five arguments, those that are absent or have no elements are not written.
template <bool meta>
void gated_bwd_into(const Tensor& grad_out, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z,
                    const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd, OptionalSize group_size,
                    bool norm_before_gate, std::string_view activation, bool subtract_mean, const OptionalTensor& grad_x,
                    const OptionalTensor& grad_z, const OptionalTensor& out, const Tensor& grad_weight,
                    const Tensor& grad_bias) {
  const Call call{gated_name(subtract_mean), x, x, weight, bias, group_size, subtract_mean};
  const ArgumentChecks checks = check_call(call, "x");
  for (const auto& [name, tensor] :
       {std::pair<const char*, const OptionalTensor&>("z", z), {"grad_x", grad_x}, {"grad_z", grad_z}, {"out", out}}) {
    checks.tensor(name, tensor, kRowAxes, x.sym_sizes(), x.scalar_type());
  }
  TORCH_CHECK_VALUE(!is_present(grad_z) || is_present(z), call.op, ": expected z, whose gradient is asked for, got None");
  checks.tensor("grad_out", grad_out, kRowAxes, x.sym_sizes(), x.scalar_type());
  check_statistics(call, checks, mean, rstd);
  NormBwdParams params;
  params.activation = parse_activation(call.op, activation);
  params.norm_before_gate = norm_before_gate;
  if constexpr (!meta) {
    Rows rows(call.op);
    rows.add(x, Access::kRead, "x", params.x);
    rows.add(z, Access::kRead, "z", params.z);
    rows.add(grad_out, Access::kRead, "grad_out", params.grad_out);
    rows.add(grad_x, Access::kWrite, "grad_x", params.grad_x);
    rows.add(grad_z, Access::kWrite, "grad_z", params.grad_z);
    rows.add(out, Access::kWrite, "out", params.out);
    run_bwd(call, params, rows, rstd, mean, grad_weight, grad_bias);
  }
}

template <bool meta>
Four gated_bwd(const Tensor& grad_out, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z,
               const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd, OptionalSize group_size,
               bool norm_before_gate, std::string_view activation, bool subtract_mean, FourFlags needs_grad) {
  const Call call{gated_name(subtract_mean), x, x, weight, bias, group_size, subtract_mean};
  check_call(call, "x");
  OptionalTensor grad_x, grad_z;
  if (needs_grad[0]) grad_x = empty_rows(x, x.scalar_type());
  if (needs_grad[2] && is_present(z)) grad_z = empty_rows(x, x.scalar_type());
  const Tensor grad_weight = empty_gradient(call, weight, needs_grad[1]);
  const Tensor grad_bias = empty_gradient(call, bias, needs_grad[3]);
  gated_bwd_into<meta>(grad_out, x, weight, z, bias, mean, rstd, group_size, norm_before_gate, activation, subtract_mean,
                       grad_x, grad_z, std::nullopt, grad_weight, grad_bias);
  return {grad_x.has_value() ? *grad_x : nothing(call), grad_weight, grad_z.has_value() ? *grad_z : nothing(call), grad_bias};
}

template <bool meta>
std::tuple<Tensor, Tensor> gated_bwd_out(const Tensor& grad_out, const Tensor& x, const OptionalTensor& weight,
                                         const OptionalTensor& z, const OptionalTensor& bias, const Tensor& mean,
                                         const Tensor& rstd, OptionalSize group_size, bool norm_before_gate,
                                         std::string_view activation, bool subtract_mean, TwoFlags needs_grad,
                                         const OptionalTensor& grad_x, const OptionalTensor& grad_z,
                                         const OptionalTensor& out) {
  const Call call{gated_name(subtract_mean), x, x, weight, bias, group_size, subtract_mean};
  check_call(call, "x");
  const Tensor grad_weight = empty_gradient(call, weight, needs_grad[0]);
  const Tensor grad_bias = empty_gradient(call, bias, needs_grad[1]);
  gated_bwd_into<meta>(grad_out, x, weight, z, bias, mean, rstd, group_size, norm_before_gate, activation, subtract_mean,
                       grad_x, grad_z, out, grad_weight, grad_bias);
  return {grad_weight, grad_bias};
}

const auto& gated_fwd_op() {
  static const auto op = find_op<decltype(gated_fwd<true>)>("ssm_kernels::_norm_gated_fwd");
  return op;
}

Tensor gated_no_grad(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z, const OptionalTensor& bias,
                     double eps, OptionalSize group_size, bool norm_before_gate, std::string_view activation,
                     bool subtract_mean) {
  return std::get<0>(gated_fwd_op().call(x, weight, z, bias, eps, group_size, norm_before_gate, activation, subtract_mean));
}

// Saves the inputs, rstd and mean.
class NormGated : public torch::autograd::Function<NormGated> {
 public:
  // Backward calls a registered operator and nothing else, so compiled autograd may look inside.
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z,
                        const OptionalTensor& bias, double eps, OptionalSize group_size, bool norm_before_gate,
                        const std::string& activation, bool subtract_mean) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, rstd, mean] =
        gated_fwd_op().call(x, weight, z, bias, eps, group_size, norm_before_gate, activation, subtract_mean);
    ctx->save_for_backward({x, or_undefined(weight), or_undefined(z), or_undefined(bias), mean, rstd});
    if (group_size.has_value()) ctx->saved_data["group_size"] = *group_size;
    ctx->saved_data["norm_before_gate"] = norm_before_gate;
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["subtract_mean"] = subtract_mean;
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    constexpr size_t kNumArguments = 9;  // of forward, after ctx
    variable_list result(kNumArguments);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const FourFlags needs_grad = needed_gradients(ctx, {true, saved[1].defined(), saved[2].defined(), saved[3].defined()});
    OptionalSize group_size;
    if (ctx->saved_data.count("group_size") > 0) group_size = ctx->saved_data["group_size"].toSymInt();
    static const auto op = find_op<decltype(gated_bwd<true>)>("ssm_kernels::_norm_gated_bwd");
    const auto [grad_x, grad_weight, grad_z, grad_bias] =
        op.call(grads[0], saved[0], or_absent(saved[1]), or_absent(saved[2]), or_absent(saved[3]), saved[4], saved[5],
                group_size, ctx->saved_data["norm_before_gate"].toBool(), ctx->saved_data["activation"].toStringView(),
                ctx->saved_data["subtract_mean"].toBool(), needs_grad);
    const Tensor computed[] = {grad_x, grad_weight, grad_z, grad_bias};
    for (size_t i = 0; i < needs_grad.size(); ++i) {
      if (needs_grad[i]) result[i] = computed[i];
    }
    return result;
  }
};

Tensor gated_autograd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z, const OptionalTensor& bias,
                      double eps, OptionalSize group_size, bool norm_before_gate, std::string_view activation,
                      bool subtract_mean) {
  check_no_func_transform(gated_name(subtract_mean));
  if (!is_recorded({&weight, &z, &bias}, x)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return gated_no_grad(x, weight, z, bias, eps, group_size, norm_before_gate, activation, subtract_mean);
  }
  return NormGated::apply(x, weight, z, bias, eps, group_size, norm_before_gate, std::string(activation), subtract_mean);
}

template <at::DeviceType device_type>
Tensor gated_autocast(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z, const OptionalTensor& bias,
                      double eps, OptionalSize group_size, bool norm_before_gate, std::string_view activation,
                      bool subtract_mean) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  static const auto op = find_op<GatedSignature>("ssm_kernels::_norm_gated");
  const at::ScalarType dtype = x.scalar_type();
  return op.call(x, as_legal<device_type>(weight, dtype), at::autocast::cached_cast(dtype, z, device_type),
                 as_legal<device_type>(bias, dtype), eps, std::move(group_size), norm_before_gate, activation, subtract_mean);
}

template <bool meta>
void implement_gated_kernels(torch::Library& m) {
  m.impl("_norm_gated_fwd", &gated_fwd<meta>);
  m.impl("_norm_gated_bwd", &gated_bwd<meta>);
  m.impl("_norm_gated_bwd_out", &gated_bwd_out<meta>);
}

constexpr const char* kGatedKernels[] = {"_norm_gated_fwd", "_norm_gated_bwd", "_norm_gated_bwd_out"};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) { m.impl("_norm_gated", &gated_autocast<at::kCPU>); }

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) { m.impl("_norm_gated", &gated_autocast<at::kCUDA>); }

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("_norm_gated", &gated_no_grad); }

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_norm_gated", &gated_autograd);
  for (const char* name : kGatedKernels) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement_gated_kernels<true>(m); }

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement_gated_kernels<false>(m); }

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
#ifdef SSM_KERNELS_WITH_CUDA
  implement_gated_kernels<false>(m);
#else
  for (const char* name : kGatedKernels) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#endif
}

}  // namespace ssm_kernels::norm
