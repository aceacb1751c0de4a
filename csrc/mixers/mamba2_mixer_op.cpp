// Convolution, scan and gated norm between the projections of a Mamba-2 mixer, as one differentiable operator for every device:
//
//   z, xBC, dt = projected            (batch, seqlen, d_ssm + (d_ssm + 2 ngroups dstate) + heads), d_ssm = heads headdim
//   x, B, C    = silu(conv(xBC))
//   y          = SSD(x, dt, -e^A_log, B, C, D)
//   out        = norm(y silu(z)), norm(y) silu(z) or, without norm_weight, y silu(z)
//
// Forward saves `projected`, y, the parameters as the scan reads them and the norm's rstd per group; backward recomputes the
// convolution, the step sizes and the norm. Kernels write the gradients of z, xBC and dt directly into the gradient of
// `projected`.
//
// A second operator, _mamba2_mixer_projected, keeps less. With the weight of the out-projection it returns
//
//   out weight^T + bias
//
// and does not keep the projection's input: the norm's backward writes it again, with the same bits. With recomputes_scan it
// does not keep y either, which is then the scan's forward in backward.

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <tuple>
#include <vector>

#include "causal_conv1d/causal_conv1d_op.h"
#include "mixers/mamba2_call.h"
#include "mixers/mixer_parameters_op.h"
#include "norm/norm_call.h"
#include "ssd/ssd_op.h"
#include "torch/allocation.h"
#include "torch/autocast.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/eager.h"
#include "torch/schemas.h"

namespace ssm_kernels::mamba2_mixer {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The Mamba-2 mixer between its projections: convolution, scan and gated norm. The head of this file has the formulas.
  // Forward alone also returns what it saves for backward.
  const std::string mixer_arguments =
      "Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor? D, Tensor dt_bias, Tensor? norm_weight, "
      "Tensor? conv_state, Tensor? ssm_state, Tensor? seq_idx, Tensor? cu_seqlens, int headdim, int ngroups, int dstate, "
      "SymInt? chunk_size, float dt_min, float dt_max, float eps, bool norm_before_gate, str discretization";
  const std::string mixer_results = ") -> (Tensor out, Tensor final_conv_state, Tensor final_ssm_state";
  schemas.def("_mamba2_mixer(" + mixer_arguments + ", str layer='Mamba2'" + mixer_results + ")");
  // Without applies_norm, `out` is y, before the gate and a norm whose groups continue on other devices; the results y and rstd
  // are empty.
  schemas.below_autograd("_mamba2_mixer_fwd(" + mixer_arguments + ", bool applies_norm=True" + mixer_results +
                         ", Tensor y, Tensor rstd, Tensor parameters)");
  // norm_mean_product is mean_product of _norm_gated_bwd.
  schemas.below_autograd(
      "_mamba2_mixer_bwd(Tensor? grad_out, Tensor? grad_final_conv_state, Tensor? grad_final_ssm_state, Tensor y, "
      "Tensor rstd, Tensor parameters, bool[9] needs_grad, " +
      mixer_arguments +
      ", Tensor? norm_mean_product=None, str layer='Mamba2') -> (Tensor grad_projected, Tensor grad_conv_weight, Tensor "
      "grad_conv_bias, "
      "Tensor grad_A_log, Tensor grad_D, Tensor grad_dt_bias, Tensor grad_norm_weight, Tensor grad_conv_state, "
      "Tensor grad_ssm_state)");
  // The same with the out-projection, if its weight is given, and without y among what backward keeps.
  const std::string projected_arguments =
      mixer_arguments +
      ", Tensor? out_proj_weight, Tensor? out_proj_bias, bool recomputes_scan, str layer='Mamba2', bool casts_projection=False";
  schemas.def("_mamba2_mixer_projected(" + projected_arguments + mixer_results + ")");
  schemas.below_autograd("_mamba2_mixer_projected_fwd(" + projected_arguments + mixer_results +
                         ", Tensor y, Tensor rstd, Tensor parameters)");
  schemas.below_autograd(
      "_mamba2_mixer_projected_bwd(Tensor? grad_out, Tensor? grad_final_conv_state, Tensor? grad_final_ssm_state, Tensor y, "
      "Tensor rstd, Tensor parameters, bool[11] needs_grad, " +
      projected_arguments +
      ") -> (Tensor grad_projected, Tensor grad_conv_weight, Tensor grad_conv_bias, Tensor grad_A_log, "
      "Tensor grad_D, Tensor grad_dt_bias, Tensor grad_norm_weight, Tensor grad_conv_state, Tensor grad_ssm_state, "
      "Tensor grad_out_proj_weight, Tensor grad_out_proj_bias)");
}

namespace {

// In the order of the operators' arguments; the last two of _mamba2_mixer_projected alone.
enum Grad {
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
  kProjWeight = kNumGrads,
  kProjBias,
  kNumProjectedGrads
};
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct FwdInputs : Inputs {
  // If false, `out` is y: the caller applies the gate and the norm, whose groups continue on other devices.
  bool applies_norm = true;

  auto fields() { return std::tuple_cat(fields_but_layer(), std::tie(applies_norm)); }
};

// y, rstd and parameters are saved for backward. Without a norm, y and rstd are empty.
struct Outputs {
  at::Tensor out, conv_state, ssm_state, y, rstd, parameters;

  auto fields() { return std::tie(out, conv_state, ssm_state, y, rstd, parameters); }
};

// At least one of the first three is present.
struct BwdInputs {
  OptionalTensor grad_out, grad_conv_state, grad_ssm_state;
  at::Tensor y, rstd, parameters;
  NeedsGrad needs_grad{};
  Inputs in;
  OptionalTensor norm_mean_product;
  bool keeps_rows = false;  // Whether the gradient of `projected` has its strides. Not in the schema.

  auto grads() { return std::tie(grad_out, grad_conv_state, grad_ssm_state); }
  auto saved() { return std::tie(y, rstd, parameters); }
  auto fields() {
    return std::tuple_cat(grads(), saved(), std::tie(needs_grad), in.fields_but_layer(), std::tie(norm_mean_product, in.layer));
  }
};

struct ProjectedInputs : Inputs {
  OptionalTensor proj_weight, proj_bias;
  bool recomputes_scan = false;
  // Under autocast: forward and backward cast the projection's parameters each for itself, so that no copies are kept, neither
  // for backward nor by autocast.
  bool casts_projection = false;

  auto differentiable() { return std::tuple_cat(Inputs::differentiable(), std::tie(proj_weight, proj_bias)); }
  auto tensors() { return std::tuple_cat(Inputs::tensors(), std::tie(proj_weight, proj_bias)); }
  auto fields_but_layer() {
    return std::tuple_cat(Inputs::fields_but_layer(), std::tie(proj_weight, proj_bias, recomputes_scan));
  }
  auto fields() { return std::tuple_cat(fields_but_layer(), std::tie(layer, casts_projection)); }

  bool projects() const { return is_present(proj_weight); }
  // The weight or the bias as the product takes it.
  at::Tensor in_product(const at::Tensor& parameter) const {
    return casts_projection ? parameter.to(projected.scalar_type()) : parameter;
  }
};

// At least one of the first three is present.
struct ProjectedBwdInputs {
  OptionalTensor grad_out, grad_conv_state, grad_ssm_state;
  at::Tensor y, rstd, parameters;
  std::array<bool, kNumProjectedGrads> needs_grad{};
  ProjectedInputs in;
  bool keeps_rows = false;  // as of BwdInputs

  auto grads() { return std::tie(grad_out, grad_conv_state, grad_ssm_state); }
  auto saved() { return std::tie(y, rstd, parameters); }
  auto fields() { return std::tuple_cat(grads(), saved(), std::tie(needs_grad), in.fields()); }
};
using ProjectedGrads = std::array<at::Tensor, kNumProjectedGrads>;

// The scan and its adjoint. They are calls of functions, as no operator writes gradients into memory of the caller. Profiles
// show them under the names of the operators.
ssd::FwdOutputs scan_fwd(const ssd::Inputs& in) {
  RECORD_FUNCTION("ssm_kernels::_ssd_chunk_scan_fwd", std::vector<c10::IValue>({in.x, in.dt, in.A, in.B, in.C}));
  return ssd::fwd(in);
}

ssd::GradTensors scan_bwd(const ssd::BwdInputs& bwd) {
  const ssd::Inputs& in = bwd.in;
  RECORD_FUNCTION("ssm_kernels::_ssd_chunk_scan_bwd",
                  std::vector<c10::IValue>({bwd.grad_out, bwd.grad_final_states, in.x, in.dt, in.A, in.B, in.C}));
  return ssd::bwd(bwd);
}

Outputs forward(const FwdInputs& in) {
  const Call call(in, {});
  TORCH_CHECK_VALUE(in.applies_norm || call.has_norm(), kOp, ": expected norm_weight with applies_norm=False, got None");
  auto [conv_out, conv_state] = call.convolve();
  auto [y, ssm_state] = scan_fwd(call.scan_inputs(conv_out));
  y = y.flatten(-2);
  const auto none = [&, &y = y] { return empty_tensor({0}, y.options()); };
  if (!call.has_norm() || !in.applies_norm) return {y, conv_state, ssm_state, none(), none(), call.parameters.saved};
  auto [out, rstd, mean] = call.normalize(y);
  return {out, conv_state, ssm_state, y, rstd, call.parameters.saved};
}

// Called with the output of the norm.
using OnNormed = std::function<void(const at::Tensor&)>;

// Gradients that are not needed are undefined. Releases tensors of `bwd` when they have been read. conv_out: the convolution's
// output, if the caller has computed it. If on_normed is given, the norm's backward writes its output, too.
GradTensors backward(BwdInputs& bwd, at::Tensor conv_out = {}, OnNormed on_normed = {}) {
  const Inputs& in = bwd.in;
  const NeedsGrad& needs_grad = bwd.needs_grad;
  const Call call(in, bwd.parameters);
  GradTensors grads;
  // Traced calls have the strides of the Meta kernel.
  const at::Tensor grad_projected = bwd.keeps_rows ? empty_rows_like(in.projected) : empty_contiguous_like(in.projected);

  ssd::BwdInputs scan;
  scan.grad_final_states = bwd.grad_ssm_state;
  if (call.has_norm()) {
    if (is_present(bwd.grad_out)) {
      static const Operator<norm::GatedParameterGrads, norm::GatedBwdOutInputs> op("ssm_kernels::_norm_gated_bwd_out");
      const at::Tensor grad_y = empty_tensor_like(bwd.y);
      norm::GatedBwdOutInputs norm;
      norm.grad_out = *bwd.grad_out;
      norm.in = call.norm_inputs(bwd.y);
      norm.mean = empty_tensor({0}, bwd.rstd.options());
      norm.rstd = bwd.rstd;
      norm.mean_product = bwd.norm_mean_product;
      norm.needs_parameter_grad = {needs_grad[kNormWeight], false};
      norm.grad_x = grad_y;
      norm.grad_z = call.z_of(grad_projected);
      if (on_normed) norm.out = empty_tensor_like(bwd.y);
      norm.eps = in.eps;
      auto [grad_weight, grad_bias] = op(norm);
      if (needs_grad[kNormWeight]) grads[kNormWeight] = grad_weight;
      scan.grad_out = call.in_heads(grad_y);
      OptionalTensor normed = norm.out;
      norm = {};
      bwd.grad_out.reset();
      bwd.y.reset();
      if (on_normed) on_normed(*normed);
      on_normed = {};
    } else {
      call.z_of(grad_projected).zero_();
      if (needs_grad[kNormWeight]) grads[kNormWeight] = in.norm_weight->new_zeros({call.d_ssm});
    }
  } else if (is_present(bwd.grad_out)) {
    scan.grad_out = call.in_heads(*bwd.grad_out);
  }

  NeedsGrad needs_scan = needs_grad;
  needs_scan[kNormWeight] = false;
  if (std::none_of(needs_scan.begin(), needs_scan.end(), [](bool needs) { return needs; })) return grads;

  at::Tensor grad_conv_out;
  {
    if (!conv_out.defined()) conv_out = call.convolve().out;
    grad_conv_out = empty_tensor_like(conv_out);
    scan.in = call.scan_inputs(conv_out);
    conv_out.reset();
    scan.needs_grad.fill(true);
    scan.needs_grad[ssd::kGradA] = needs_grad[kALog];
    scan.needs_grad[ssd::kGradD] = needs_grad[kD];
    scan.needs_grad[ssd::kGradDtBias] = needs_grad[kDtBias];
    scan.needs_grad[ssd::kGradInitialStates] = needs_grad[kSsmState];
    scan.targets[ssd::kGradX] = call.x_of(grad_conv_out);
    scan.targets[ssd::kGradB] = call.B_of(grad_conv_out);
    scan.targets[ssd::kGradC] = call.C_of(grad_conv_out);
    scan.targets[ssd::kGradDt] = call.dt_of(grad_projected);
    if (!call.has_norm()) scan.targets[ssd::kGradZ] = call.in_heads(grad_projected);
    const ssd::GradTensors scan_grads = scan_bwd(scan);
    if (needs_grad[kALog]) {
      grads[kALog] = mixers::grad_of_A_log(scan_grads[ssd::kGradA], call.parameters.A, in.A_log.scalar_type());
    }
    if (needs_grad[kD]) grads[kD] = mixers::in_dtype_of(scan_grads[ssd::kGradD], *in.D);
    if (needs_grad[kDtBias]) grads[kDtBias] = mixers::in_dtype_of(scan_grads[ssd::kGradDtBias], in.dt_bias);
    if (needs_grad[kSsmState]) grads[kSsmState] = scan_grads[ssd::kGradInitialStates];
    scan = {};
  }

  static const Operator<causal_conv1d::BwdOutGrads, causal_conv1d::BwdOutInputs> op("ssm_kernels::_causal_conv1d_bwd_out");
  causal_conv1d::BwdOutInputs convolution;
  convolution.grad_out = grad_conv_out;
  convolution.grad_final_state = bwd.grad_conv_state;
  convolution.in = call.convolution_inputs();
  convolution.needs_grad = {true, needs_grad[kConvWeight], needs_grad[kConvBias], needs_grad[kConvState]};
  convolution.required_grad_x = call.conv_in_of(grad_projected);
  auto [grad_weight, grad_bias, grad_state] = op(convolution);
  if (needs_grad[kProjected]) grads[kProjected] = grad_projected;
  if (needs_grad[kConvWeight]) grads[kConvWeight] = grad_weight.view(in.conv_weight.sizes());
  if (needs_grad[kConvBias]) grads[kConvBias] = grad_bias;
  if (needs_grad[kConvState]) grads[kConvState] = grad_state;
  return grads;
}

template <size_t count>
std::array<at::Tensor, count> or_empty(std::array<at::Tensor, count> grads, const at::TensorOptions& options) {
  for (at::Tensor& grad : grads) {
    if (!grad.defined()) grad = empty_tensor({0}, options);
  }
  return grads;
}

GradTensors bwd(BwdInputs& in) { return or_empty(backward(in), in.parameters.options()); }

struct Widened {
  at::Tensor rows;
  c10::SymInt columns;

  auto fields() { return std::tie(rows, columns); }
};

// Zeros behind the rows, if the weight has more columns: a layer whose rows do not fill whole vectors gives such a weight.
at::Tensor in_columns_of(const at::Tensor& weight, const at::Tensor& rows) {
  static const Operator<at::Tensor, Widened> op("ssm_kernels::_copy_rows");
  const c10::SymInt columns = weight.sym_size(1);
  return rows.sym_size(-1) < columns ? op(Widened{rows, columns}) : rows;
}

// y is empty if it is not kept. Without a norm, it is the input of the out-projection, and kept for its sake alone.
Outputs projected_forward(const ProjectedInputs& in) {
  Outputs outputs = forward(FwdInputs{in, true});
  if (in.projects()) {
    if (!is_present(in.norm_weight)) outputs.y = outputs.out;
    OptionalTensor bias;
    if (is_present(in.proj_bias)) bias = in.in_product(*in.proj_bias);
    outputs.out = at::linear(in_columns_of(*in.proj_weight, outputs.out), in.in_product(*in.proj_weight), bias);
  }
  if (in.recomputes_scan) outputs.y = empty_tensor({0}, outputs.out.options());
  return outputs;
}

// The gradients of the out-projection by the products that autograd takes for torch.nn.functional.linear, and then those of
// the mixer.
ProjectedGrads projected_backward(ProjectedBwdInputs& bwd) {
  ProjectedGrads grads;
  const bool has_norm = is_present(bwd.in.norm_weight), has_grad_out = is_present(bwd.grad_out);
  const bool needs_mixer =
      std::any_of(bwd.needs_grad.begin(), bwd.needs_grad.begin() + kNumGrads, [](bool needs) { return needs; });
  const bool needs_weight = bwd.needs_grad[kProjWeight];

  at::Tensor conv_out;
  OnNormed on_normed;
  if (bwd.in.recomputes_scan && has_grad_out && (needs_weight || (has_norm && needs_mixer))) {
    const Call call(bwd.in, bwd.parameters);
    conv_out = call.convolve().out;
    bwd.y = scan_fwd(call.scan_inputs(conv_out)).out.flatten(-2);
  }
  if (bwd.in.projects() && has_grad_out) {
    at::Tensor grad_out = bwd.grad_out->flatten(0, -2);
    const auto set_weight_grad = [&, grad_out](const at::Tensor& out) {
      const at::Tensor projected = in_columns_of(*bwd.in.proj_weight, out);
      grads[kProjWeight] = mixers::in_dtype_of(grad_out.t().mm(projected.flatten(0, -2)), *bwd.in.proj_weight);
    };
    if (needs_weight) {
      if (has_norm && needs_mixer) {
        on_normed = set_weight_grad;
      } else {
        set_weight_grad(has_norm ? Call(bwd.in, bwd.parameters).normalize(bwd.y).out : bwd.y);
      }
    }
    if (bwd.needs_grad[kProjBias]) grads[kProjBias] = mixers::in_dtype_of(grad_out.sum(0), *bwd.in.proj_bias);
    if (needs_mixer) {
      c10::SymDimVector sizes(bwd.grad_out->sym_sizes().begin(), bwd.grad_out->sym_sizes().end());
      sizes.back() = bwd.in.proj_weight->sym_size(1);
      const c10::SymInt columns = bwd.in.dt_bias.sym_size(0) * bwd.in.headdim;
      bwd.grad_out = grad_out.mm(bwd.in.in_product(*bwd.in.proj_weight)).view_symint(sizes).narrow_symint(-1, 0, columns);
    }
  } else {
    if (needs_weight) grads[kProjWeight] = at::zeros_like(*bwd.in.proj_weight);
    if (bwd.needs_grad[kProjBias]) grads[kProjBias] = at::zeros_like(*bwd.in.proj_bias);
  }
  if (!needs_mixer) return grads;

  BwdInputs mixer;
  mixer.grad_out = std::move(bwd.grad_out);
  mixer.grad_conv_state = bwd.grad_conv_state;
  mixer.grad_ssm_state = bwd.grad_ssm_state;
  mixer.y = std::move(bwd.y);
  mixer.rstd = bwd.rstd;
  mixer.parameters = bwd.parameters;
  mixer.keeps_rows = bwd.keeps_rows;
  std::copy_n(bwd.needs_grad.begin(), kNumGrads, mixer.needs_grad.begin());
  mixer.in = bwd.in;
  GradTensors of_mixer = backward(mixer, std::move(conv_out), std::move(on_normed));
  std::move(of_mixer.begin(), of_mixer.end(), grads.begin());
  return grads;
}

ProjectedGrads projected_bwd(ProjectedBwdInputs& in) { return or_empty(projected_backward(in), in.parameters.options()); }

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The base of both operators. Where nothing records operators, they call their functions directly.
template <typename Op, typename FwdInputsType, typename BwdInputsType>
struct MixerOp : DifferentiableOp<Op, BwdInputsType, Result> {
  using Base = DifferentiableOp<Op, BwdInputsType, Result>;
  using typename Base::GradTensors;
  using typename Base::Inputs;

  static const char* name(const Inputs&) { return kOp; }

  static auto differentiable(Inputs& in) { return in.differentiable(); }

  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<Outputs, FwdInputsType> op(Op::kForward);
    const bool is_eager = !c10::impl::dispatch_mode_enabled() && has_plain_tensors(in.tensors());
    const FwdInputsType fwd{in};
    Outputs outputs = is_eager ? Op::run(fwd) : op(fwd);
    if (saved != nullptr) *saved = {outputs.y, outputs.rstd, outputs.parameters};
    return {std::move(outputs.out), std::move(outputs.conv_state), std::move(outputs.ssm_state)};
  }

  static GradTensors backward(BwdInputsType& bwd) {
    if (!runs_eagerly() || !has_plain_tensors(std::tuple_cat(bwd.in.tensors(), bwd.saved(), bwd.grads()))) {
      return Base::backward(bwd);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    bwd.keeps_rows = true;
    return Op::run_backward(bwd);
  }
};

struct Mamba2Mixer : MixerOp<Mamba2Mixer, FwdInputs, BwdInputs> {
  static constexpr char kSchema[] = "ssm_kernels::_mamba2_mixer";
  static constexpr char kForward[] = "ssm_kernels::_mamba2_mixer_fwd", kBackward[] = "ssm_kernels::_mamba2_mixer_bwd";

  static Outputs run(const FwdInputs& in) { return mamba2_mixer::forward(in); }
  static GradTensors run_backward(BwdInputs& bwd) { return mamba2_mixer::backward(bwd); }

  // The sequence and the convolution's state in the autocast dtype; parameters and the scan's state in float32.
  static void cast(mamba2_mixer::Inputs& in, const Autocast& to) {
    to.to_lower(in.projected, in.conv_state);
    to.to_float(in.conv_weight, in.conv_bias, in.A_log, in.D, in.dt_bias, in.norm_weight, in.ssm_state);
  }
};

struct Mamba2MixerProjected : MixerOp<Mamba2MixerProjected, ProjectedInputs, ProjectedBwdInputs> {
  static constexpr char kSchema[] = "ssm_kernels::_mamba2_mixer_projected";
  static constexpr char kForward[] = "ssm_kernels::_mamba2_mixer_projected_fwd";
  static constexpr char kBackward[] = "ssm_kernels::_mamba2_mixer_projected_bwd";

  static Outputs run(const ProjectedInputs& in) { return projected_forward(in); }

  static ProjectedGrads run_backward(ProjectedBwdInputs& bwd) {
    // The products have the dtype of forward's, wherever backward is called.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(bwd.in.projected.device().type()));
    return projected_backward(bwd);
  }

  // As Mamba2Mixer; the out-projection as torch.nn.functional.linear.
  static void cast(ProjectedInputs& in, const Autocast& to) {
    Mamba2Mixer::cast(in, to);
    in.casts_projection =
        in.projects() && in.projected.scalar_type() == to.lower && in.proj_weight->scalar_type() != at::kDouble;
  }
};

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(Mamba2Mixer)
SSM_DIFFERENTIABLE_OPERATOR(Mamba2MixerProjected)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&forward>(m, "_mamba2_mixer_fwd");
  implement<&bwd>(m, "_mamba2_mixer_bwd");
  implement<&projected_forward>(m, "_mamba2_mixer_projected_fwd");
  implement<&projected_bwd>(m, "_mamba2_mixer_projected_bwd");
}

}  // namespace ssm_kernels::mamba2_mixer
