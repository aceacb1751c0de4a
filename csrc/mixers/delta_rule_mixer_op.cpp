// Convolutions, scan, gated norm and out-projection of a layer around a delta rule, as one differentiable operator for every
// device:
//
//   q, k, v = conv(q), conv(k), conv(v), each with an activation, or as they are without a weight of the convolution
//   y       = delta rule(q, k, v, beta, g)              (batch, seqlen, value_heads, value_dim)
//   out     = norm(y) a(z) or, without norm_weight, y   (batch, seqlen, value_heads value_dim)
//   out     = out weight^T + bias, with the weight of the out-projection
//
// Forward saves its inputs, y and the norm's rstd; with recomputes_scan it does not save y, which is then the scan's forward in
// backward. Backward recomputes the convolutions. The norm's backward writes the input of the out-projection again.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "causal_conv1d/causal_conv1d_op.h"
#include "delta_rule/delta_rule_op.h"
#include "mixers/mixer_parameters_op.h"
#include "mixers/normed_projection.h"
#include "torch/allocation.h"
#include "torch/autocast.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/eager.h"
#include "torch/schemas.h"

namespace ssm_kernels::delta_rule_mixer {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // A layer around a delta rule after its projections. The head of this file has the formulas. q, k, v and z are (batch,
  // seqlen, columns) without an axis of heads, and k, v and beta have the updates of a step one after another.
  const std::string arguments =
      "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? z, Tensor? q_weight, Tensor? k_weight, Tensor? v_weight, "
      "Tensor? q_bias, Tensor? k_bias, Tensor? v_bias, Tensor? A_log, Tensor? dt_bias, Tensor? norm_weight, Tensor? q_state, "
      "Tensor? k_state, Tensor? v_state, Tensor? ssm_state, Tensor? out_proj_weight, Tensor? out_proj_bias, Tensor? seq_idx, "
      "Tensor? cu_seqlens, int key_dim, int value_dim, int num_householder, str? qk_activation, bool qk_l2norm, "
      "float? gate_lower_bound, bool beta_sigmoid, bool allow_neg_eigval, float eps, bool norm_before_gate, "
      "str norm_activation, bool recomputes_scan, str layer, bool casts_projection=False";
  const std::string results = ") -> (Tensor out, Tensor final_ssm_state";
  schemas.def("_delta_rule_mixer(" + arguments + results + ")");
  // Forward alone also returns what it saves for backward.
  schemas.below_autograd("_delta_rule_mixer_fwd(" + arguments + results + ", Tensor y, Tensor rstd)");
  schemas.below_autograd(
      "_delta_rule_mixer_bwd(Tensor? grad_out, Tensor? grad_final_ssm_state, Tensor y, Tensor rstd, bool[21] needs_grad, " +
      arguments +
      ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_beta, Tensor grad_g, Tensor grad_z, Tensor "
      "grad_q_weight, "
      "Tensor grad_k_weight, Tensor grad_v_weight, Tensor grad_q_bias, Tensor grad_k_bias, Tensor grad_v_bias, "
      "Tensor grad_A_log, Tensor grad_dt_bias, Tensor grad_norm_weight, Tensor grad_q_state, Tensor grad_k_state, "
      "Tensor grad_v_state, Tensor grad_ssm_state, Tensor grad_out_proj_weight, Tensor grad_out_proj_bias)");
}

namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr size_t kSequences = 3;  // q, k and v
constexpr char kActivation[] = "silu";

// In the order of the operator's arguments. Three in a row are those of q, k and v.
enum Grad {
  kSequence,
  kBeta = kSequence + kSequences,
  kG,
  kZ,
  kConvWeight,
  kConvBias = kConvWeight + kSequences,
  kALog = kConvBias + kSequences,
  kDtBias,
  kNormWeight,
  kConvState,
  kSsmState = kConvState + kSequences,
  kProjWeight,
  kProjBias,
  kNumGrads
};
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct Inputs {
  at::Tensor q, k, v, beta;
  OptionalTensor g, z, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, A_log, dt_bias, norm_weight, q_state, k_state,
      v_state, ssm_state, proj_weight, proj_bias, seq_idx, cu_seqlens;
  int64_t key_dim = 0, value_dim = 0, num_householder = 1;
  std::optional<std::string_view> qk_activation;
  bool qk_l2norm = false;
  std::optional<double> gate_lower_bound;
  bool beta_sigmoid = false, allow_neg_eigval = false;
  double eps = 0;
  bool norm_before_gate = false;
  std::string_view norm_activation;
  bool recomputes_scan = false;
  std::string_view layer;
  // Under autocast: forward and backward cast the projection's parameters each for itself, so that no copies are kept.
  bool casts_projection = false;

  auto differentiable() {
    return std::tie(q, k, v, beta, g, z, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, A_log, dt_bias, norm_weight,
                    q_state, k_state, v_state, ssm_state, proj_weight, proj_bias);
  }
  auto tensors() { return std::tuple_cat(differentiable(), std::tie(seq_idx, cu_seqlens)); }
  auto fields() {
    return std::tuple_cat(tensors(), std::tie(key_dim, value_dim, num_householder, qk_activation, qk_l2norm, gate_lower_bound,
                                              beta_sigmoid, allow_neg_eigval, eps, norm_before_gate, norm_activation,
                                              recomputes_scan, layer, casts_projection));
  }

  mixers::NormedProjection end() const {
    mixers::NormedProjection end;
    end.z = z;
    end.norm_weight = norm_weight;
    end.proj_weight = proj_weight;
    end.proj_bias = proj_bias;
    end.row_size = value_dim;
    end.eps = eps;
    end.norm_before_gate = norm_before_gate;
    end.activation = norm_activation;
    end.casts_projection = casts_projection;
    return end;
  }
};

// y and rstd are saved for backward, and empty if they are not needed.
struct Outputs {
  at::Tensor out, ssm_state, y, rstd;

  auto fields() { return std::tie(out, ssm_state, y, rstd); }
};

// At least one of the first two is present.
struct BwdInputs {
  OptionalTensor grad_out, grad_ssm_state;
  at::Tensor y, rstd;
  NeedsGrad needs_grad{};
  Inputs in;

  auto grads() { return std::tie(grad_out, grad_ssm_state); }
  auto saved() { return std::tie(y, rstd); }
  auto fields() { return std::tuple_cat(grads(), saved(), std::tie(needs_grad), in.fields()); }
};

at::Tensor in_heads(const at::Tensor& columns, int64_t size) { return columns.unflatten(-1, {-1, size}); }

// Copies only rows that are not whole: views of another layout than the convolution's.
at::Tensor in_updates(const at::Tensor& columns, int64_t updates, int64_t size) {
  return updates == 1 ? in_heads(columns, size) : columns.unflatten(-1, {updates, -1, size}).flatten(1, 2);
}

// The arguments of the operators that the mixer is composed of.
struct Call {
  const Inputs& in;

  using Sequences = std::array<at::Tensor, kSequences>;

  const at::Tensor& sequence(size_t i) const { return i == 0 ? in.q : i == 1 ? in.k : in.v; }
  const OptionalTensor& weight(size_t i) const { return i == 0 ? in.q_weight : i == 1 ? in.k_weight : in.v_weight; }
  const OptionalTensor& bias(size_t i) const { return i == 0 ? in.q_bias : i == 1 ? in.k_bias : in.v_bias; }
  const OptionalTensor& state(size_t i) const { return i == 0 ? in.q_state : i == 1 ? in.k_state : in.v_state; }

  causal_conv1d::Inputs convolution_inputs(size_t i) const {
    causal_conv1d::Inputs convolution;
    convolution.x = sequence(i);
    convolution.weight = mixers::taps_of(*weight(i));
    convolution.bias = bias(i);
    convolution.seq_idx = in.seq_idx;
    convolution.cu_seqlens = in.cu_seqlens;
    convolution.initial_state = state(i);
    if (i == 2) {
      convolution.activation = kActivation;
    } else {
      convolution.activation = in.qk_activation;
    }
    return convolution;
  }

  Sequences convolve() const {
    static const Operator<causal_conv1d::FwdOutputs, causal_conv1d::Inputs> op("ssm_kernels::_causal_conv1d_fwd");
    Sequences convolved;
    for (size_t i = 0; i < kSequences; ++i) {
      convolved[i] = is_present(weight(i)) ? op(convolution_inputs(i)).out : sequence(i);
    }
    return convolved;
  }

  delta_rule::Inputs scan_inputs(const Sequences& convolved) const {
    delta_rule::Inputs scan;
    scan.q = in_heads(convolved[0], in.key_dim);
    scan.k = in_updates(convolved[1], in.num_householder, in.key_dim);
    scan.v = in_updates(convolved[2], in.num_householder, in.value_dim);
    scan.beta = in.beta;
    scan.g = in.g;
    scan.initial_states = in.ssm_state;
    scan.seq_idx = in.seq_idx;
    scan.cu_seqlens = in.cu_seqlens;
    scan.num_householder = in.num_householder;
    scan.qk_l2norm = in.qk_l2norm;
    scan.A_log = in.A_log;
    scan.dt_bias = in.dt_bias;
    scan.gate_lower_bound = in.gate_lower_bound;
    scan.beta_sigmoid = in.beta_sigmoid;
    scan.allow_neg_eigval = in.allow_neg_eigval;
    return scan;
  }

  delta_rule::FwdOutputs scan(const Sequences& convolved) const {
    static const Operator<delta_rule::FwdOutputs, delta_rule::Inputs> op("ssm_kernels::_delta_rule_scan_fwd");
    return op(scan_inputs(convolved));
  }
};

Outputs forward(const Inputs& in) {
  const Call call{in};
  const mixers::NormedProjection end = in.end();
  auto [y, ssm_state, states] = call.scan(call.convolve());
  const mixers::NormedProjection::Outputs ended = end.forward(y);
  // Backward reads y for the norm, or as the input of the out-projection.
  const bool keeps_y = (end.has_norm() || end.projects()) && !in.recomputes_scan;
  return {ended.out, ssm_state, keeps_y ? y : empty_tensor({0}, y.options()), ended.rstd};
}

// Memory for the gradients of q, k and v, if these are columns of one buffer, one after another: the same columns of a buffer
// of gradients. A layer that projects q, k and v together then reads their gradients as one matrix. Otherwise undefined
// tensors.
Call::Sequences allocate_columns(const Call& call) {
  const at::Tensor& q = call.in.q;
  const int64_t row = q.stride(1);
  std::array<int64_t, kSequences + 1> places{};
  for (size_t i = 0; i < kSequences; ++i) {
    const at::Tensor& x = call.sequence(i);
    const bool is_next = x.is_alias_of(q) && x.storage_offset() == q.storage_offset() + places[i] && x.stride(2) == 1 &&
                         x.stride(1) == row && x.stride(0) == x.size(1) * row;
    if (!is_next) return {};
    places[i + 1] = places[i] + x.size(2);
  }
  if (places.back() > row) return {};
  const at::Tensor buffer = empty_tensor({q.size(0), q.size(1), row}, q.options());
  Call::Sequences columns;
  for (size_t i = 0; i < kSequences; ++i) columns[i] = buffer.narrow(2, places[i], places[i + 1] - places[i]);
  return columns;
}

// Gradients that are not needed are undefined. Releases tensors of `bwd` when they have been read. With `joins_columns`
// gradients may share memory, as results of an operator must not.
GradTensors backward(BwdInputs& bwd, bool joins_columns = false) {
  const Inputs& in = bwd.in;
  const NeedsGrad& needs_grad = bwd.needs_grad;
  const Call call{in};
  GradTensors grads;
  const bool has_grad_out = is_present(bwd.grad_out);
  const auto needs_any = [&](std::initializer_list<Grad> of, size_t count = 1) {
    return std::any_of(of.begin(), of.end(), [&](Grad first) {
      return std::any_of(needs_grad.begin() + first, needs_grad.begin() + first + count, [](bool needs) { return needs; });
    });
  };
  const bool needs_scan = needs_any({kSequence, kConvWeight, kConvBias, kConvState}, kSequences) ||
                          needs_any({kBeta, kG, kALog, kDtBias, kSsmState});
  const mixers::NormedProjection end = in.end();
  const mixers::NormedProjection::Needs of_end = {.y = needs_scan,
                                                  .z = needs_grad[kZ],
                                                  .norm_weight = needs_grad[kNormWeight],
                                                  .proj_weight = needs_grad[kProjWeight],
                                                  .proj_bias = needs_grad[kProjBias]};
  Call::Sequences convolved;
  if (has_grad_out && in.recomputes_scan && end.reads_y(of_end)) {
    convolved = call.convolve();
    bwd.y = call.scan(convolved).out;
  }
  delta_rule::BwdInputs scan;
  scan.grad_final_states = bwd.grad_ssm_state;
  {
    mixers::NormedProjection::Grads ended = end.backward(std::exchange(bwd.grad_out, {}), std::exchange(bwd.y, {}), bwd.rstd,
                                                         empty_tensor({0}, bwd.rstd.options()), of_end);
    grads[kZ] = std::move(ended.z);
    grads[kNormWeight] = std::move(ended.norm_weight);
    grads[kProjWeight] = std::move(ended.proj_weight);
    grads[kProjBias] = std::move(ended.proj_bias);
    if (!needs_scan) return grads;
    if (ended.y.defined()) scan.grad_out = in_heads(ended.y, in.value_dim);
  }

  std::array<c10::SymDimVector, kSequences> sizes;
  Call::Sequences grads_of_convolved;
  {
    if (!convolved[0].defined()) convolved = call.convolve();
    scan.in = call.scan_inputs(convolved);
    for (size_t i = 0; i < kSequences; ++i) {
      sizes[i] = c10::SymDimVector(convolved[i].sym_sizes().begin(), convolved[i].sym_sizes().end());
      const bool needs_convolution = needs_grad[kConvWeight + i] || needs_grad[kConvBias + i] || needs_grad[kConvState + i];
      scan.needs_grad[delta_rule::kGradQ + i] = needs_grad[kSequence + i] || needs_convolution;
    }
    convolved = {};
    scan.needs_grad[delta_rule::kGradBeta] = needs_grad[kBeta];
    scan.needs_grad[delta_rule::kGradG] = needs_grad[kG];
    scan.needs_grad[delta_rule::kGradInitialStates] = needs_grad[kSsmState];
    scan.needs_grad[delta_rule::kGradALog] = needs_grad[kALog];
    scan.needs_grad[delta_rule::kGradDtBias] = needs_grad[kDtBias];
    static const Operator<delta_rule::GradTensors, delta_rule::BwdInputs> op("ssm_kernels::_delta_rule_scan_bwd");
    delta_rule::GradTensors of_scan = op(scan);
    scan = {};
    if (needs_grad[kBeta]) grads[kBeta] = of_scan[delta_rule::kGradBeta];
    if (needs_grad[kG]) grads[kG] = of_scan[delta_rule::kGradG];
    if (needs_grad[kSsmState]) grads[kSsmState] = of_scan[delta_rule::kGradInitialStates];
    if (needs_grad[kALog]) grads[kALog] = of_scan[delta_rule::kGradALog];
    if (needs_grad[kDtBias]) grads[kDtBias] = of_scan[delta_rule::kGradDtBias];
    for (size_t i = 0; i < kSequences; ++i) grads_of_convolved[i] = std::move(of_scan[delta_rule::kGradQ + i]);
  }

  static const Operator<causal_conv1d::GradTensors, causal_conv1d::BwdInputs> op("ssm_kernels::_causal_conv1d_bwd");
  static const Operator<causal_conv1d::BwdOutGrads, causal_conv1d::BwdOutInputs> op_out("ssm_kernels::_causal_conv1d_bwd_out");
  const auto is_written = [&](size_t i) { return needs_grad[kSequence + i] && is_present(call.weight(i)); };
  Call::Sequences columns;
  if (joins_columns && is_written(0) && is_written(1) && is_written(2)) columns = allocate_columns(call);
  for (size_t i = 0; i < kSequences; ++i) {
    const std::array<bool, causal_conv1d::kNumGrads> needs = {needs_grad[kSequence + i], needs_grad[kConvWeight + i],
                                                              needs_grad[kConvBias + i], needs_grad[kConvState + i]};
    if (std::none_of(needs.begin(), needs.end(), [](bool each) { return each; })) continue;
    at::Tensor grad = std::exchange(grads_of_convolved[i], {}).reshape_symint(sizes[i]);
    if (!is_present(call.weight(i))) {
      grads[kSequence + i] = grad;
      continue;
    }
    causal_conv1d::BwdOutInputs convolution;
    convolution.grad_out = std::move(grad);
    convolution.in = call.convolution_inputs(i);
    convolution.needs_grad = needs;
    convolution.layer = in.layer;
    causal_conv1d::GradTensors of_convolution;
    if (columns[i].defined()) {
      convolution.required_grad_x = columns[i];
      causal_conv1d::BwdOutGrads others = op_out(convolution);
      of_convolution[causal_conv1d::kGradX] = columns[i];
      std::move(others.begin(), others.end(), of_convolution.begin() + 1);
    } else {
      of_convolution = op(convolution);
    }
    if (needs_grad[kSequence + i]) grads[kSequence + i] = of_convolution[causal_conv1d::kGradX];
    if (needs_grad[kConvWeight + i]) {
      grads[kConvWeight + i] = of_convolution[causal_conv1d::kGradWeight].view_symint(call.weight(i)->sym_sizes());
    }
    if (needs_grad[kConvBias + i]) grads[kConvBias + i] = of_convolution[causal_conv1d::kGradBias];
    if (needs_grad[kConvState + i]) grads[kConvState + i] = of_convolution[causal_conv1d::kGradInitialState];
  }
  return grads;
}

GradTensors bwd(BwdInputs& in) {
  GradTensors grads = backward(in);
  for (at::Tensor& grad : grads) {
    if (!grad.defined()) grad = empty_tensor({0}, in.rstd.options());
  }
  return grads;
}

// Where nothing records operators, forward and backward are called directly.
struct DeltaRuleMixer : DifferentiableOp<DeltaRuleMixer, BwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_delta_rule_mixer";
  static constexpr char kForward[] = "ssm_kernels::_delta_rule_mixer_fwd", kBackward[] = "ssm_kernels::_delta_rule_mixer_bwd";

  static const char* name(const Inputs&) { return "delta_rule_scan"; }

  static auto differentiable(Inputs& in) { return in.differentiable(); }

  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<Outputs, Inputs> op(kForward);
    const bool is_eager = !c10::impl::dispatch_mode_enabled() && has_plain_tensors(in.tensors());
    Outputs outputs = is_eager ? delta_rule_mixer::forward(in) : op(in);
    if (saved != nullptr) *saved = {outputs.y, outputs.rstd};
    return {std::move(outputs.out), std::move(outputs.ssm_state)};
  }

  static GradTensors backward(BwdInputs& bwd) {
    if (!runs_eagerly() || !has_plain_tensors(std::tuple_cat(bwd.in.tensors(), bwd.saved(), bwd.grads()))) {
      return DifferentiableOp::backward(bwd);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    // The products have the dtype of forward's, wherever backward is called.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(bwd.in.q.device().type()));
    return delta_rule_mixer::backward(bwd, /*joins_columns=*/true);
  }

  // As causal_conv1d, delta_rule_scan, rms_norm_gated and torch.nn.functional.linear.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.q, in.k, in.v, in.z, in.q_state, in.k_state, in.v_state);
    to.to_float_unless(to.lower, in.beta, in.g, in.q_weight, in.k_weight, in.v_weight, in.q_bias, in.k_bias, in.v_bias,
                       in.norm_weight);
    to.to_float(in.A_log, in.dt_bias, in.ssm_state);
    in.casts_projection =
        is_present(in.proj_weight) && in.q.scalar_type() == to.lower && in.proj_weight->scalar_type() != at::kDouble;
  }
};

Outputs fwd(Inputs& in) { return forward(in); }

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(DeltaRuleMixer)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&fwd>(m, "_delta_rule_mixer_fwd");
  implement<&bwd>(m, "_delta_rule_mixer_bwd");
}

}  // namespace ssm_kernels::delta_rule_mixer
