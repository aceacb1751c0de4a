// The norms' dispatcher entries for every device: checks, allocation, Meta, Autograd. The four public operators are one boxed
// function over _norm_gated and _add_norm, which tell RMSNorm and LayerNorm apart by `subtract_mean`.

#include "norm/norm_op.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>

#include "norm/norm_views.h"
#include "torch/arguments.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"

namespace ssm_kernels::norm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalSize = std::optional<c10::SymInt>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kActivationNames[] = {"silu", "gelu", "gelu_tanh", "sigmoid", "none"};
constexpr char kRowAxes[] = "(..., columns)";

GateActivation parse_activation(const char* op, std::string_view name) {
  std::string known;
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<GateActivation>(i);
    known += (i > 0 ? ", " : "") + std::string(kActivationNames[i]);
  }
  TORCH_CHECK_VALUE(false, op, ": unknown activation '", name, "', expected one of: ", known);
}

// The arguments that both operators share. `x` is new_residual in add_norm's backward, `like` the tensor that has the dtype of
// x there.
struct Call {
  const char* op;
  const Tensor &x, &like;
  const OptionalTensor &weight, &bias;
  const OptionalSize& group_size;
  bool subtract_mean;

  c10::SymInt columns() const { return like.sym_size(-1); }
  c10::SymInt group() const { return group_size.has_value() ? *group_size : columns(); }
  c10::SymInt groups() const { return columns() / group(); }
  c10::SymInt rows() const {
    c10::SymInt rows = 1;
    for (const c10::SymInt& size : like.sym_sizes().slice(0, like.dim() - 1)) rows = rows * size;
    return rows;
  }
  at::TensorOptions statistics_options() const { return like.options().dtype(accumulate_type(like.scalar_type())); }
};

const char* gated_name(bool subtract_mean) { return subtract_mean ? "layer_norm_gated" : "rms_norm_gated"; }
const char* add_name(bool subtract_mean) { return subtract_mean ? "add_layer_norm" : "add_rms_norm"; }

ArgumentChecks check_call(const Call& call, const char* like_name) {
  const ArgumentChecks checks(call.op, like_name, call.like);
  TORCH_CHECK_VALUE(call.like.dim() >= 1 && call.columns() >= 1, call.op, ": expected ", like_name, " of shape ", kRowAxes,
                    " with at least one column, got ", call.like.sym_sizes());
  TORCH_CHECK_VALUE(call.columns() <= kMaxColumns, call.op, ": expected at most ", kMaxColumns, " columns, got ",
                    call.columns());
  TORCH_CHECK_VALUE(call.group() >= 1 && call.columns() % call.group() == 0, call.op,
                    ": expected group_size to divide columns = ", call.columns(), ", got ", call.group());
  const auto check_parameter = [&](const char* name, const OptionalTensor& parameter) {
    if (!is_present(parameter)) return;
    checks.shape(name, *parameter, "(columns,)", {call.columns()});
    checks.dtype_or_accumulate(name, *parameter);
    checks.device(name, *parameter);
  };
  check_parameter("weight", call.weight);
  check_parameter("bias", call.bias);
  return checks;
}

void check_eps(const char* op, double eps) { TORCH_CHECK_VALUE(eps >= 0, op, ": expected eps >= 0, got ", eps); }

void check_statistics(const Call& call, const ArgumentChecks& checks, const Tensor& mean, const Tensor& rstd) {
  checks.tensor("rstd", rstd, "(rows, groups)", {call.rows(), call.groups()}, checks.accumulate());
  if (call.subtract_mean) {
    checks.tensor("mean", mean, "(rows, groups)", {call.rows(), call.groups()}, checks.accumulate());
  }
}

// Contiguous, of any dtype.
Tensor empty_rows(const Tensor& like, at::ScalarType dtype) {
  return at::empty_symint(like.sym_sizes(), like.options().dtype(dtype));
}
Tensor empty_statistics(const Call& call) { return at::empty_symint({call.rows(), call.groups()}, call.statistics_options()); }
// Each its own: results of an operator must not share memory.
Tensor nothing(const Call& call) { return at::empty({0}, call.statistics_options()); }

Tensor empty_gradient(const Call& call, const OptionalTensor& parameter, bool is_needed) {
  return is_needed && is_present(parameter) ? at::empty_symint(parameter->sym_sizes(), parameter->options()) : nothing(call);
}

// ----- From tensors to the kernels' parameters

const DeviceKernels& kernels_of(const Tensor& tensor) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (tensor.is_cuda()) return kCuda;
#endif
  return kCpu;
}

ParameterView gradient_view(const Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return {};
  return {gradient.mutable_data_ptr(), is_accumulate(gradient)};
}

void fill_params(NormParams& params, const Call& call, Parameters& parameters) {
  params.kind = scalar_kind(call.like.scalar_type());
  params.device = call.like.get_device();
  params.group_size = call.group().expect_int();
  params.groups = call.groups().expect_int();
  params.subtract_mean = call.subtract_mean;
  params.weight = parameters.view(call.weight);
  params.bias = parameters.view(call.bias);
}

void run_fwd(const Call& call, NormFwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean) {
  if (call.like.numel() == 0) return;
  Parameters parameters;
  fill_params(params, call, parameters);
  rows.fill(params);
  params.rstd = rstd.mutable_data_ptr();
  params.mean = call.subtract_mean ? mean.mutable_data_ptr() : nullptr;
  kernels_of(call.like).fwd(params);
}

// Allocates the partial sums and runs backward.
void run_bwd(const Call& call, NormBwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean,
             const Tensor& grad_weight, const Tensor& grad_bias) {
  if (call.like.numel() == 0) {
    if (grad_weight.numel() > 0) grad_weight.zero_();
    if (grad_bias.numel() > 0) grad_bias.zero_();
    return;
  }
  Parameters parameters;
  fill_params(params, call, parameters);
  rows.fill(params);
  const Tensor kept_rstd = rstd.contiguous(), kept_mean = mean.contiguous();
  params.rstd = data_of(kept_rstd, Access::kRead);
  params.mean = call.subtract_mean ? data_of(kept_mean, Access::kRead) : nullptr;
  params.grad_weight = gradient_view(grad_weight);
  params.grad_bias = gradient_view(grad_bias);
  const DeviceKernels& kernels = kernels_of(call.like);
  Tensor partials;
  const int64_t sums = (params.grad_weight.data != nullptr) + (params.grad_bias.data != nullptr);
  params.partials = kernels.count_partials(params);
  if (sums > 0) {
    partials = at::empty({sums, params.partials, params.columns()}, call.statistics_options());
    auto* next = static_cast<char*>(partials.mutable_data_ptr());
    for (auto [gradient, partial] :
         {std::pair(params.grad_weight.data, &params.partial_weight), std::pair(params.grad_bias.data, &params.partial_bias)}) {
      if (gradient == nullptr) continue;
      *partial = next;
      next += partials.stride(0) * partials.element_size();
    }
  }
  kernels.bwd(params);
}

// ----- norm_gated

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using FourFlags = std::array<bool, 4>;
using TwoFlags = std::array<bool, 2>;

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

// Of both forms of backward: what is absent or has no elements in the last five is not written.
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

using GatedSignature = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
                              OptionalSize, bool, std::string_view, bool);

const auto& gated_op() {
  static const auto op = find_op<GatedSignature>("ssm_kernels::_norm_gated");
  return op;
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

// Which of the inputs, in their order, have edges and need gradients: those that are absent have no edge of the graph.
FourFlags needed_gradients(AutogradContext* ctx, const std::array<bool, 4>& is_input_present) {
  FourFlags needs_grad{};
  size_t edge = 0;
  for (size_t i = 0; i < needs_grad.size(); ++i) needs_grad[i] = is_input_present[i] && ctx->needs_input_grad(edge++);
  return needs_grad;
}

// Whether autograd has to record the call. With a tangent of forward-mode AD, apply() says that there is none.
bool is_recorded(std::initializer_list<const OptionalTensor*> inputs, const Tensor& x) {
  const auto concerns = [](const Tensor& tensor) {
    return (at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
  };
  bool result = concerns(x);
  for (const OptionalTensor* input : inputs) result = result || (is_present(*input) && concerns(**input));
  return result;
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

// ----- add_norm

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

using AddSignature = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                const OptionalTensor&, double, OptionalSize, bool, bool);

const auto& add_op() {
  static const auto op = find_op<AddSignature>("ssm_kernels::_add_norm");
  return op;
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

// Every public operator. Its name says which one it is.
void public_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  check_arguments(handle, *stack);
  const std::string name = public_name(handle);
  const bool subtract_mean = name.find("layer_norm") != std::string::npos;
  auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  auto next = arguments.begin();
  const Tensor x = (next++)->toTensor();
  std::array<OptionalTensor, 3> tensors;
  for (OptionalTensor& tensor : tensors) tensor = (next++)->toOptional<Tensor>();
  const double eps = (next++)->toDouble();
  if (name.rfind("add_", 0) == 0) {
    auto [normed, new_residual] =
        add_op().call(x, tensors[0], tensors[1], tensors[2], eps, std::nullopt, next->toBool(), subtract_mean);
    return torch::jit::push(*stack, std::move(normed), std::move(new_residual));
  }
  const OptionalSize group_size = next->isNone() ? OptionalSize() : OptionalSize(next->toSymInt());
  const bool norm_before_gate = (++next)->toBool();
  const std::string activation = (++next)->toStringRef();
  torch::jit::push(*stack, gated_op().call(x, tensors[0], tensors[1], tensors[2], eps, group_size, norm_before_gate, activation,
                                           subtract_mean));
}

template <bool meta>
void implement_kernels(torch::Library& m) {
  m.impl("_norm_gated_fwd", &gated_fwd<meta>);
  m.impl("_norm_gated_bwd", &gated_bwd<meta>);
  m.impl("_norm_gated_bwd_out", &gated_bwd_out<meta>);
  m.impl("_add_norm_fwd", &add_fwd<meta>);
  m.impl("_add_norm_bwd", &add_bwd<meta>);
}

constexpr const char* kKernels[] = {"_norm_gated_fwd", "_norm_gated_bwd", "_norm_gated_bwd_out", "_add_norm_fwd",
                                    "_add_norm_bwd"};

}  // namespace

namespace {

// Under autocast a parameter of a third dtype beside x is cast to float32, and so is a residual; the gate is cast to x's dtype.
template <at::DeviceType device_type>
OptionalTensor as_legal(const OptionalTensor& tensor, at::ScalarType dtype) {
  const bool is_legal = !is_present(tensor) || tensor->scalar_type() == dtype;
  return is_legal ? tensor : OptionalTensor(at::autocast::cached_cast(at::kFloat, *tensor, device_type));
}

template <at::DeviceType device_type>
Tensor gated_autocast(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& z, const OptionalTensor& bias,
                      double eps, std::optional<c10::SymInt> group_size, bool norm_before_gate, std::string_view activation,
                      bool subtract_mean) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  static const auto op = find_op<GatedSignature>("ssm_kernels::_norm_gated");
  const at::ScalarType dtype = x.scalar_type();
  return op.call(x, as_legal<device_type>(weight, dtype), at::autocast::cached_cast(dtype, z, device_type),
                 as_legal<device_type>(bias, dtype), eps, std::move(group_size), norm_before_gate, activation, subtract_mean);
}

template <at::DeviceType device_type>
std::tuple<Tensor, Tensor> add_autocast(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, std::optional<c10::SymInt> group_size,
                                        bool residual_in_fp32, bool subtract_mean) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  static const auto op = find_op<AddSignature>("ssm_kernels::_add_norm");
  const auto legal = [&](const OptionalTensor& tensor) { return as_legal<device_type>(tensor, x.scalar_type()); };
  return op.call(x, legal(residual), legal(weight), legal(bias), eps, std::move(group_size), residual_in_fp32, subtract_mean);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) {
  m.impl("_norm_gated", &gated_autocast<at::kCPU>);
  m.impl("_add_norm", &add_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) {
  m.impl("_norm_gated", &gated_autocast<at::kCUDA>);
  m.impl("_add_norm", &add_autocast<at::kCUDA>);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  for (const char* name : {"rms_norm_gated", "layer_norm_gated", "add_rms_norm", "add_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&public_operator>());
  }
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("_norm_gated", &gated_no_grad);
  m.impl("_add_norm", &add_no_grad);
}

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_norm_gated", &gated_autograd);
  m.impl("_add_norm", &add_autograd);
  for (const char* name : kKernels) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement_kernels<true>(m); }

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement_kernels<false>(m); }

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
#ifdef SSM_KERNELS_WITH_CUDA
  implement_kernels<false>(m);
#else
  for (const char* name : kKernels) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#endif
}

}  // namespace ssm_kernels::norm
