// Convolution, scan and gated norm between the projections of a Mamba-2 mixer, as one differentiable operator for every device:
//
//   z, xBC, dt = projected            (batch, seqlen, d_ssm + (d_ssm + 2 ngroups dstate) + heads), d_ssm = heads headdim
//   x, B, C    = silu(conv(xBC))
//   y          = SSD(x, dt, -e^A_log, B, C, D)
//   out        = norm(y silu(z)), norm(y) silu(z) or, without norm_weight, y silu(z)
//
// Backward keeps `projected`, y, the parameters as the scan reads them and a number for each row's groups, and computes the
// convolution, the step sizes and the norm again. The gradient of `projected` is one tensor: the gradients of z, xBC and dt are
// written where they lie in it.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "causal_conv1d/causal_conv1d_op.h"
#include "mixers/mixer_parameters_op.h"
#include "ssd/ssd_op.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/eager.h"
#include "torch/needs_autograd.h"

namespace ssm_kernels::mamba2_mixer {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
constexpr char kOp[] = "Mamba2", kActivation[] = "silu";

// In the order of the operator's arguments.
enum Place {
  kProjected,
  kConvWeight,
  kConvBias,
  kALog,
  kD,
  kDtBias,
  kNormWeight,
  kConvState,
  kSsmState,
  kNumGrads,
  kSeqIdx = kNumGrads,
  kCuSeqlens,
  kNumTensors
};
using Tensors = std::array<OptionalTensor, kNumTensors>;
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct Options {
  int64_t headdim = 0, groups = 0, dstate = 0;
  std::optional<c10::SymInt> chunk_size;
  double dt_min = 0, dt_max = 0, eps = 0;
  bool norm_before_gate = false;
  std::string discretization;
};

// A call's arguments under their names, and the parts of `projected`.
struct Call {
  const Tensors& tensors;
  const Options& options;
  int64_t heads, d_ssm, d_conv_in;
  mixers::Parameters parameters;  // A, the bias of dt and D as the scan reads them

  // With the parameters that forward saved or, in forward, an undefined tensor.
  Call(const Tensors& tensors, const Options& options, const at::Tensor& saved_parameters)
      : tensors(tensors),
        options(options),
        heads(of(kDtBias).size(0)),
        d_ssm(heads * options.headdim),
        d_conv_in(d_ssm + 2 * options.groups * options.dstate),
        parameters(saved_parameters.defined()
                       ? mixers::restore_parameters(saved_parameters, of(kALog), tensors[kDtBias], tensors[kD])
                       : mixers::compute_parameters(of(kALog), tensors[kDtBias], tensors[kD], of(kProjected).scalar_type())) {
    const c10::SymInt columns = of(kProjected).sym_size(-1);
    TORCH_CHECK_VALUE(columns == d_ssm + d_conv_in + heads, kOp, ": expected projected of ", d_ssm + d_conv_in + heads,
                      " columns, got ", columns);
  }

  const at::Tensor& of(Place place) const { return *tensors[place]; }
  bool has_norm() const { return is_present(tensors[kNormWeight]); }
  c10::SymInt group_size() const { return d_ssm / options.groups; }

  at::Tensor z_of(const at::Tensor& projected) const { return columns(projected, 0, {d_ssm}); }
  at::Tensor conv_in_of(const at::Tensor& projected) const { return columns(projected, d_ssm, {d_conv_in}); }
  at::Tensor dt_of(const at::Tensor& projected) const { return columns(projected, d_ssm + d_conv_in, {heads}); }
  at::Tensor z_in_heads(const at::Tensor& projected) const { return in_heads(projected); }
  at::Tensor in_heads(const at::Tensor& sequence) const { return columns(sequence, 0, {heads, options.headdim}); }

  // x, B and C, or their gradients, in the convolution's output, or its gradient.
  at::Tensor x_of(const at::Tensor& conv_out) const { return in_heads(conv_out); }
  at::Tensor B_of(const at::Tensor& conv_out) const { return in_groups(conv_out, 0); }
  at::Tensor C_of(const at::Tensor& conv_out) const { return in_groups(conv_out, 1); }

  // The convolution's weight, (channels, width), which nn.Conv1d has as (channels, 1, width).
  at::Tensor taps() const { return of(kConvWeight).dim() == 3 ? of(kConvWeight).squeeze(1) : of(kConvWeight); }

  ssd::Inputs scan_inputs(const at::Tensor& conv_out) const {
    ssd::Inputs in;
    in.x = x_of(conv_out);
    in.dt = dt_of(of(kProjected));
    in.A = parameters.A;
    in.B = B_of(conv_out);
    in.C = C_of(conv_out);
    in.chunk_size = options.chunk_size;
    in.D = parameters.D;
    if (!has_norm()) in.z = z_in_heads(of(kProjected));
    in.dt_bias = parameters.bias;
    in.dt_softplus = true;
    in.dt_min = options.dt_min;
    in.dt_max = options.dt_max;
    in.initial_states = tensors[kSsmState];
    in.seq_idx = tensors[kSeqIdx];
    in.cu_seqlens = tensors[kCuSeqlens];
    in.discretization = options.discretization;
    return in;
  }

  std::tuple<at::Tensor, at::Tensor> convolve() const {
    static const auto op = find_op<causal_conv1d::FwdSignature>("ssm_kernels::_causal_conv1d_fwd");
    return op.call(conv_in_of(of(kProjected)), taps(), tensors[kConvBias], tensors[kSeqIdx], tensors[kCuSeqlens],
                   tensors[kConvState], kActivation);
  }

 private:
  at::Tensor in_groups(const at::Tensor& conv_out, int64_t which) const {
    return columns(conv_out, d_ssm + which * options.groups * options.dstate, {options.groups, options.dstate});
  }

  // As many columns as `axes` have elements, seen under these axes. One operator where none is recorded, as there are many.
  static at::Tensor columns(const at::Tensor& tensor, int64_t first, std::initializer_list<int64_t> axes) {
    const int64_t count = c10::multiply_integers(axes);
    if (c10::impl::dispatch_mode_enabled() || !is_plain(tensor)) {
      const at::Tensor narrow = tensor.narrow(-1, first, count);
      return axes.size() == 1 ? narrow : narrow.unflatten(-1, axes);
    }
    const int64_t stride = tensor.stride(-1);
    c10::DimVector sizes(tensor.sizes().begin(), tensor.sizes().end() - 1);
    c10::DimVector strides(tensor.strides().begin(), tensor.strides().end() - 1);
    int64_t inner = count;
    for (const int64_t size : axes) {
      inner /= std::max<int64_t>(1, size);
      sizes.push_back(size);
      strides.push_back(inner * stride);
    }
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + first * stride);
  }
};

using NormFwdSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const OptionalTensor&,
                                                                        const OptionalTensor&, const OptionalTensor&, double,
                                                                        std::optional<c10::SymInt>, bool, std::string_view,
                                                                        bool);
using NormBwdOutSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                               const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                                                               const at::Tensor&, std::optional<c10::SymInt>, bool,
                                                               std::string_view, bool, std::array<bool, 2>,
                                                               const OptionalTensor&, const OptionalTensor&,
                                                               const OptionalTensor&);

// The last three are saved for backward; without a norm y and rstd have no elements.
struct Outputs {
  at::Tensor out, conv_state, ssm_state, y, rstd, parameters;
};

Outputs forward(const Tensors& tensors, const Options& options) {
  const Call call(tensors, options, {});
  auto [conv_out, conv_state] = call.convolve();
  auto [y, ssm_state] = ssd::forward(call.scan_inputs(conv_out));
  y = y.flatten(-2);
  const auto none = [&] { return at::empty({0}, y.options()); };
  if (!call.has_norm()) return {y, conv_state, ssm_state, none(), none(), call.parameters.saved};
  static const auto op = find_op<NormFwdSignature>("ssm_kernels::_norm_gated_fwd");
  auto [out, rstd, mean] = op.call(y, tensors[kNormWeight], call.z_of(call.of(kProjected)), std::nullopt, options.eps,
                                   call.group_size(), options.norm_before_gate, kActivation, /*subtract_mean=*/false);
  return {out, conv_state, ssm_state, y, rstd, call.parameters.saved};
}

// At least one of grad_out and the gradients of the states is there. Gradients that are not needed are undefined.
GradTensors backward(const OptionalTensor& grad_out, const OptionalTensor& grad_conv_state,
                     const OptionalTensor& grad_ssm_state, const at::Tensor& y, const at::Tensor& rstd,
                     const at::Tensor& parameters, const Tensors& tensors, const Options& options,
                     const NeedsGrad& needs_grad) {
  const Call call(tensors, options, parameters);
  const at::Tensor& projected = call.of(kProjected);
  GradTensors grads;
  const at::Tensor grad_projected = at::empty_like(projected, projected.options(), at::MemoryFormat::Contiguous);

  ssd::BwdInputs scan;
  scan.grad_final_states = grad_ssm_state;
  if (call.has_norm()) {
    if (is_present(grad_out)) {
      static const auto op = find_op<NormBwdOutSignature>("ssm_kernels::_norm_gated_bwd_out");
      const at::Tensor grad_y = at::empty_like(y);
      auto [grad_weight, grad_bias] =
          op.call(*grad_out, y, tensors[kNormWeight], call.z_of(projected), std::nullopt, at::empty({0}, rstd.options()), rstd,
                  call.group_size(), options.norm_before_gate, kActivation, /*subtract_mean=*/false,
                  {needs_grad[kNormWeight], false}, grad_y, call.z_of(grad_projected), std::nullopt);
      if (needs_grad[kNormWeight]) grads[kNormWeight] = grad_weight;
      scan.grad_out = call.in_heads(grad_y);
    } else {
      call.z_of(grad_projected).zero_();
      if (needs_grad[kNormWeight]) grads[kNormWeight] = call.of(kNormWeight).new_zeros({call.d_ssm});
    }
  } else if (is_present(grad_out)) {
    scan.grad_out = call.in_heads(*grad_out);
  }

  NeedsGrad needs_scan = needs_grad;
  needs_scan[kNormWeight] = false;
  if (std::none_of(needs_scan.begin(), needs_scan.end(), [](bool needs) { return needs; })) return grads;

  at::Tensor grad_conv_out;
  {
    const at::Tensor conv_out = std::get<0>(call.convolve());
    grad_conv_out = at::empty_like(conv_out);
    scan.in = call.scan_inputs(conv_out);
    scan.needs_grad.fill(true);
    scan.needs_grad[ssd::kGradA] = needs_grad[kALog];
    scan.needs_grad[ssd::kGradD] = needs_grad[kD];
    scan.needs_grad[ssd::kGradDtBias] = needs_grad[kDtBias];
    scan.needs_grad[ssd::kGradInitialStates] = needs_grad[kSsmState];
    scan.targets[ssd::kGradX] = call.x_of(grad_conv_out);
    scan.targets[ssd::kGradB] = call.B_of(grad_conv_out);
    scan.targets[ssd::kGradC] = call.C_of(grad_conv_out);
    scan.targets[ssd::kGradDt] = call.dt_of(grad_projected);
    if (!call.has_norm()) scan.targets[ssd::kGradZ] = call.z_in_heads(grad_projected);
    const ssd::GradTensors scan_grads =
        std::apply([](const auto&... grad) { return ssd::GradTensors{grad...}; }, ssd::backward(scan));
    if (needs_grad[kALog]) {
      grads[kALog] = mixers::grad_of_A_log(scan_grads[ssd::kGradA], call.parameters.A, call.of(kALog).scalar_type());
    }
    if (needs_grad[kD]) grads[kD] = mixers::in_dtype_of(scan_grads[ssd::kGradD], call.of(kD));
    if (needs_grad[kDtBias]) grads[kDtBias] = mixers::in_dtype_of(scan_grads[ssd::kGradDtBias], call.of(kDtBias));
    if (needs_grad[kSsmState]) grads[kSsmState] = scan_grads[ssd::kGradInitialStates];
    scan = {};
  }

  static const auto op = find_op<causal_conv1d::BwdOutSignature>("ssm_kernels::_causal_conv1d_bwd_out");
  at::Tensor grad_conv_in = call.conv_in_of(grad_projected);
  auto [grad_weight, grad_bias, grad_state] =
      op.call(grad_conv_out, grad_conv_state, call.conv_in_of(projected), call.taps(), tensors[kConvBias], tensors[kSeqIdx],
              tensors[kCuSeqlens], tensors[kConvState], kActivation,
              {true, needs_grad[kConvWeight], needs_grad[kConvBias], needs_grad[kConvState]}, grad_conv_in,
              /*grad_out_2=*/std::nullopt);
  if (needs_grad[kProjected]) grads[kProjected] = grad_projected;
  if (needs_grad[kConvWeight]) grads[kConvWeight] = grad_weight.view(call.of(kConvWeight).sizes());
  if (needs_grad[kConvBias]) grads[kConvBias] = grad_bias;
  if (needs_grad[kConvState]) grads[kConvState] = grad_state;
  return grads;
}

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FwdResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BwdResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// A schema's C++ signature: arguments of backward alone, if any, then those that all three operators share.
template <typename Result, typename... First>
using SignatureOf = Result(First..., const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                           const OptionalTensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t, int64_t, int64_t,
                           std::optional<c10::SymInt>, double, double, double, bool, std::string_view);
using Signature = SignatureOf<Result>;
using FwdSignature = SignatureOf<FwdResult>;
using BwdSignature = SignatureOf<BwdResult, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                 const at::Tensor&, const at::Tensor&, const at::Tensor&, NeedsGrad>;

Tensors name_tensors(const at::Tensor& projected, const at::Tensor& conv_weight, const OptionalTensor& conv_bias,
                     const at::Tensor& A_log, const OptionalTensor& D, const at::Tensor& dt_bias,
                     const OptionalTensor& norm_weight, const OptionalTensor& conv_state, const OptionalTensor& ssm_state,
                     const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens) {
  return {projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, seq_idx, cu_seqlens};
}

Options name_options(int64_t headdim, int64_t ngroups, int64_t dstate, std::optional<c10::SymInt> chunk_size, double dt_min,
                     double dt_max, double eps, bool norm_before_gate, std::string_view discretization) {
  Options options;
  options.headdim = headdim;
  options.groups = ngroups;
  options.dstate = dstate;
  options.chunk_size = std::move(chunk_size);
  options.dt_min = dt_min;
  options.dt_max = dt_max;
  options.eps = eps;
  options.norm_before_gate = norm_before_gate;
  options.discretization = discretization;
  return options;
}

// Calls an operator of that signature with the tensors and options after `first`.
template <typename Op, typename... First>
auto call_op(const Op& op, const Tensors& t, const Options& o, const First&... first) {
  return op.call(first..., *t[kProjected], *t[kConvWeight], t[kConvBias], *t[kALog], t[kD], *t[kDtBias], t[kNormWeight],
                 t[kConvState], t[kSsmState], t[kSeqIdx], t[kCuSeqlens], o.headdim, o.groups, o.dstate, o.chunk_size, o.dt_min,
                 o.dt_max, o.eps, o.norm_before_gate, o.discretization);
}

// Makes an operator's kernel of a function that takes tensors and options, and then the arguments of backward alone.
template <auto function, typename Signature>
struct Kernel;
template <auto function, typename Result, typename... Arguments>
struct Kernel<function, Result(Arguments...)> {
  static Result call(Arguments... arguments) {
    return split(std::forward_as_tuple(arguments...),
                 std::make_index_sequence<sizeof...(Arguments) - kNumTensors - kNumOptions>(),
                 std::make_index_sequence<kNumTensors>(), std::make_index_sequence<kNumOptions>());
  }

 private:
  static constexpr size_t kNumOptions = 9;
  template <typename Tuple, size_t... first, size_t... tensor, size_t... option>
  static Result split(const Tuple& all, std::index_sequence<first...>, std::index_sequence<tensor...>,
                      std::index_sequence<option...>) {
    constexpr size_t kFirst = sizeof...(first);
    const Tensors tensors = name_tensors(std::get<kFirst + tensor>(all)...);
    const Options options = name_options(std::get<kFirst + kNumTensors + option>(all)...);
    return function(tensors, options, std::get<first>(all)...);
  }
};

FwdResult fwd(const Tensors& tensors, const Options& options) {
  Outputs outputs = forward(tensors, options);
  return {outputs.out, outputs.conv_state, outputs.ssm_state, outputs.y, outputs.rstd, outputs.parameters};
}

BwdResult bwd(const Tensors& tensors, const Options& options, const OptionalTensor& grad_out,
              const OptionalTensor& grad_conv_state, const OptionalTensor& grad_ssm_state, const at::Tensor& y,
              const at::Tensor& rstd, const at::Tensor& parameters, NeedsGrad needs_grad) {
  GradTensors grads = backward(grad_out, grad_conv_state, grad_ssm_state, y, rstd, parameters, tensors, options, needs_grad);
  for (at::Tensor& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, parameters.options());
  }
  return std::tuple_cat(grads);
}

bool are_plain(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const OptionalTensor& tensor) { return is_plain(or_undefined(tensor)); });
}

// Forward as an operator or, where nothing records operators, as a function.
Outputs call_fwd(const Tensors& tensors, const Options& options) {
  if (!c10::impl::dispatch_mode_enabled() && are_plain(tensors)) return forward(tensors, options);
  static const auto op = find_op<FwdSignature>("ssm_kernels::_mamba2_mixer_fwd");
  auto [out, conv_state, ssm_state, y, rstd, parameters] = call_op(op, tensors, options);
  return {out, conv_state, ssm_state, y, rstd, parameters};
}

class Mamba2Mixer : public torch::autograd::Function<Mamba2Mixer> {
 public:
  // Backward calls a registered operator and nothing else, so compiled autograd may look inside.
  static constexpr bool is_traceable = true;

  // The tensors come as arguments of their own, where autograd looks for them, in the order of Place.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& projected,
                                                const at::Tensor& conv_weight, const OptionalTensor& conv_bias,
                                                const at::Tensor& A_log, const OptionalTensor& D, const at::Tensor& dt_bias,
                                                const OptionalTensor& norm_weight, const OptionalTensor& conv_state,
                                                const OptionalTensor& ssm_state, const Tensors& tensors,
                                                const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Outputs outputs = call_fwd(tensors, options);
    torch::autograd::variable_list saved;
    for (const OptionalTensor& tensor : tensors) saved.push_back(or_undefined(tensor));
    saved.insert(saved.end(), {outputs.y, outputs.rstd, outputs.parameters});
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["headdim"] = options.headdim;
    ctx->saved_data["groups"] = options.groups;
    ctx->saved_data["dstate"] = options.dstate;
    ctx->saved_data["chunk_size"] = options.chunk_size;
    ctx->saved_data["dt_min"] = options.dt_min;
    ctx->saved_data["dt_max"] = options.dt_max;
    ctx->saved_data["eps"] = options.eps;
    ctx->saved_data["norm_before_gate"] = options.norm_before_gate;
    ctx->saved_data["discretization"] = options.discretization;
    ctx->set_materialize_grads(false);
    return {outputs.out, outputs.conv_state, outputs.ssm_state};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    constexpr size_t kNumArguments = kNumGrads + 2;  // of forward, after ctx
    torch::autograd::variable_list result(kNumArguments);
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    Tensors tensors;
    for (size_t i = 0; i < kNumTensors; ++i) tensors[i] = or_absent(saved[i]);
    const auto option = [&](const char* name) -> const c10::IValue& { return ctx->saved_data[name]; };
    const Options options =
        name_options(option("headdim").toInt(), option("groups").toInt(), option("dstate").toInt(),
                     option("chunk_size").toOptional<c10::SymInt>(), option("dt_min").toDouble(), option("dt_max").toDouble(),
                     option("eps").toDouble(), option("norm_before_gate").toBool(), option("discretization").toStringView());
    // Absent tensors have no edge of the graph.
    NeedsGrad needs_grad{};
    size_t edge = 0;
    for (size_t i = 0; i < kNumGrads; ++i) needs_grad[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    const at::Tensor &y = saved[kNumTensors], &rstd = saved[kNumTensors + 1], &parameters = saved[kNumTensors + 2];
    const OptionalTensor grad_out = or_absent(grads[0]), grad_conv = or_absent(grads[1]), grad_ssm = or_absent(grads[2]);
    GradTensors computed;
    if (runs_eagerly() && ssm_kernels::are_plain(saved) && ssm_kernels::are_plain(grads)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      computed = mamba2_mixer::backward(grad_out, grad_conv, grad_ssm, y, rstd, parameters, tensors, options, needs_grad);
    } else {
      static const auto op = find_op<BwdSignature>("ssm_kernels::_mamba2_mixer_bwd");
      const BwdResult grads_of_op =
          call_op(op, tensors, options, grad_out, grad_conv, grad_ssm, y, rstd, parameters, needs_grad);
      computed = std::apply([](const auto&... grad) { return GradTensors{grad...}; }, grads_of_op);
    }
    for (size_t i = 0; i < kNumGrads; ++i) {
      if (needs_grad[i]) result[i] = std::move(computed[i]);
    }
    return result;
  }
};

Result mixer_no_grad(const Tensors& tensors, const Options& options) {
  const Outputs outputs = call_fwd(tensors, options);
  return {outputs.out, outputs.conv_state, outputs.ssm_state};
}

Result mixer_autograd(const Tensors& tensors, const Options& options) {
  check_no_func_transform(kOp);
  if (!std::any_of(tensors.begin(), tensors.begin() + kNumGrads, [](const auto& tensor) { return needs_autograd(tensor); })) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return mixer_no_grad(tensors, options);
  }
  auto outputs =
      Mamba2Mixer::apply(*tensors[kProjected], *tensors[kConvWeight], tensors[kConvBias], *tensors[kALog], tensors[kD],
                         *tensors[kDtBias], tensors[kNormWeight], tensors[kConvState], tensors[kSsmState], tensors, options);
  return {outputs[0], outputs[1], outputs[2]};
}

// The sequence and the convolution's state in the autocast dtype; parameters and the scan's state in float32.
template <at::DeviceType device_type>
Result mixer_autocast(const Tensors& tensors, const Options& options) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const at::ScalarType lower = at::autocast::get_autocast_dtype(device_type);
  Tensors cast = tensors;
  for (size_t i = 0; i < kNumGrads; ++i) {
    const bool is_sequence = i == kProjected || i == kConvState;
    cast[i] = at::autocast::cached_cast(is_sequence ? lower : at::kFloat, tensors[i], device_type);
  }
  static const auto op = find_op<Signature>("ssm_kernels::_mamba2_mixer");
  return call_op(op, cast, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("_mamba2_mixer", &Kernel<&mixer_no_grad, Signature>::call);
  m.impl("_mamba2_mixer_fwd", &Kernel<&fwd, FwdSignature>::call);
  m.impl("_mamba2_mixer_bwd", &Kernel<&bwd, BwdSignature>::call);
}

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_mamba2_mixer", &Kernel<&mixer_autograd, Signature>::call);
  m.impl("_mamba2_mixer_fwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("_mamba2_mixer_bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) {
  m.impl("_mamba2_mixer", &Kernel<&mixer_autocast<at::kCPU>, Signature>::call);
}

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) {
  m.impl("_mamba2_mixer", &Kernel<&mixer_autocast<at::kCUDA>, Signature>::call);
}

}  // namespace ssm_kernels::mamba2_mixer
