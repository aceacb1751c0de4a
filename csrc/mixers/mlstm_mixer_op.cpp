// Gates, scan, norm of heads and out-projection of xLSTM's layer, as one differentiable operator for every device:
//
//   i, f = cap(i), cap(f) with cap(x) = c tanh(x / c), or as they are without gate_soft_cap
//   y    = mLSTM(q, k, v, i, f)                       (batch, seqlen, heads, value_dim)
//   out  = norm(y) sigmoid(z) or, without norm_weight, y   (batch, seqlen, heads value_dim), a layer norm of each head
//   out  = out weight^T + bias, with the weight of the out-projection
//
// Forward saves its inputs, y, the divisors and the norm's statistics; with recomputes_scan it saves neither y nor divisors,
// which are then the results of the scan's forward in backward. Backward recomputes the gates and the out-projection's input.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "mixers/normed_projection.h"
#include "mlstm/mlstm_op.h"
#include "torch/allocation.h"
#include "torch/autocast.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/eager.h"
#include "torch/schemas.h"

namespace ssm_kernels::mlstm_mixer {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // xLSTM's layer after its projections. The head of this file has the formulas. q, k, v and z are (batch, seqlen, columns)
  // without an axis of heads, i and f (batch, seqlen, heads).
  const std::string arguments =
      "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor? z, Tensor? norm_weight, Tensor? norm_bias, Tensor? C, "
      "Tensor? n, Tensor? m, Tensor? out_proj_weight, Tensor? out_proj_bias, Tensor? cu_seqlens, float? gate_soft_cap, "
      "float eps, float norm_eps, bool recomputes_scan, str layer, bool casts_projection=False";
  const std::string results = ") -> (Tensor out, Tensor final_C, Tensor final_n, Tensor final_m";
  schemas.def("_mlstm_mixer(" + arguments + results + ")");
  // Forward alone also returns what it saves for backward.
  schemas.below_autograd("_mlstm_mixer_fwd(" + arguments + results + ", Tensor y, Tensor divisor, Tensor rstd, Tensor mean)");
  schemas.below_autograd(
      "_mlstm_mixer_bwd(Tensor? grad_out, Tensor? grad_final_C, Tensor? grad_final_n, Tensor y, Tensor divisor, Tensor rstd, "
      "Tensor mean, bool[13] needs_grad, " +
      arguments +
      ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_i, Tensor grad_f, Tensor grad_z, "
      "Tensor grad_norm_weight, Tensor grad_norm_bias, Tensor grad_C, Tensor grad_n, Tensor grad_m, "
      "Tensor grad_out_proj_weight, Tensor grad_out_proj_bias)");
}

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The tensors are in the order of the operator's arguments; the first five are those of the scan.
enum Grad { kQ, kK, kV, kI, kF, kZ, kNormWeight, kNormBias, kC, kN, kM, kProjWeight, kProjBias, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct Inputs {
  at::Tensor q, k, v, i, f;
  OptionalTensor z, norm_weight, norm_bias, C, n, m, proj_weight, proj_bias, cu_seqlens;
  std::optional<double> gate_soft_cap;
  double eps = 0, norm_eps = 0;
  bool recomputes_scan = false;
  std::string_view layer;
  bool casts_projection = false;

  auto differentiable() { return std::tie(q, k, v, i, f, z, norm_weight, norm_bias, C, n, m, proj_weight, proj_bias); }
  auto tensors() { return std::tuple_cat(differentiable(), std::tie(cu_seqlens)); }
  auto fields() {
    return std::tuple_cat(tensors(), std::tie(gate_soft_cap, eps, norm_eps, recomputes_scan, layer, casts_projection));
  }

  at::Tensor in_heads(const at::Tensor& columns) const { return columns.unflatten_symint(-1, {i.sym_size(-1), -1}); }

  mixers::NormedProjection end() const {
    mixers::NormedProjection end;
    end.z = z;
    end.norm_weight = norm_weight;
    end.norm_bias = norm_bias;
    end.proj_weight = proj_weight;
    end.proj_bias = proj_bias;
    end.row_size = v.sym_size(-1);
    end.group_size = v.sym_size(-1) / i.sym_size(-1);
    end.subtract_mean = true;
    end.eps = norm_eps;
    end.norm_before_gate = true;
    end.activation = "sigmoid";
    end.casts_projection = casts_projection;
    return end;
  }
};

// The members after the states are saved for backward, and empty if they are not needed.
struct Outputs {
  at::Tensor out, C, n, m, y, divisor, rstd, mean;

  auto fields() { return std::tie(out, C, n, m, y, divisor, rstd, mean); }
};

// At least one of the first three is present.
struct BwdInputs {
  OptionalTensor grad_out, grad_C, grad_n;
  at::Tensor y, divisor, rstd, mean;
  NeedsGrad needs_grad{};
  Inputs in;

  auto grads() { return std::tie(grad_out, grad_C, grad_n); }
  auto saved() { return std::tie(y, divisor, rstd, mean); }
  auto fields() { return std::tuple_cat(grads(), saved(), std::tie(needs_grad), in.fields()); }
};

// A gate before its activation, and the tangent by which its gradient follows; undefined without a cap.
struct Capped {
  at::Tensor gate, tanh;

  Capped(const at::Tensor& raw, std::optional<double> cap) : gate(raw) {
    if (!cap.has_value()) return;
    tanh = at::tanh(raw / *cap);
    gate = tanh * *cap;
  }
  at::Tensor grad_of_raw(const at::Tensor& grad) const { return tanh.defined() ? at::tanh_backward(grad, tanh) : grad; }
};

mlstm::Inputs scan_inputs(const Inputs& in, const Capped& i, const Capped& f) {
  mlstm::Inputs scan;
  scan.q = in.in_heads(in.q);
  scan.k = in.in_heads(in.k);
  scan.v = in.in_heads(in.v);
  scan.i = i.gate;
  scan.f = f.gate;
  scan.eps = in.eps;
  scan.input_gate = "exp";
  scan.initial_C = in.C;
  scan.initial_n = in.n;
  scan.initial_m = in.m;
  scan.cu_seqlens = in.cu_seqlens;
  return scan;
}

mlstm::FwdOutputs scan_forward(mlstm::Inputs scan) {
  static const Operator<mlstm::FwdOutputs, mlstm::Inputs> op("ssm_kernels::_mlstm_scan_fwd");
  return op(scan);
}

Outputs forward(const Inputs& in) {
  const mixers::NormedProjection end = in.end();
  const mlstm::FwdOutputs scanned = scan_forward(scan_inputs(in, {in.i, in.gate_soft_cap}, {in.f, in.gate_soft_cap}));
  const mixers::NormedProjection::Outputs ended = end.forward(scanned.out);
  const bool keeps_y = (end.has_norm() || end.projects()) && !in.recomputes_scan;
  const auto kept = [](bool keeps, const at::Tensor& tensor) { return keeps ? tensor : empty_tensor({0}, tensor.options()); };
  return {ended.out,
          scanned.final_C,
          scanned.final_n,
          scanned.final_m,
          kept(keeps_y, scanned.out),
          kept(!in.recomputes_scan, scanned.divisor),
          ended.rstd,
          ended.mean};
}

// Gradients that are not needed are undefined. Releases tensors of `bwd` when they have been read.
GradTensors backward(BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const NeedsGrad& needs = bwd.needs_grad;
  const mixers::NormedProjection end = in.end();
  const bool needs_scan = needs[kQ] || needs[kK] || needs[kV] || needs[kI] || needs[kF] || needs[kC] || needs[kN] || needs[kM];
  const mixers::NormedProjection::Needs of_end = {.y = needs_scan,
                                                  .z = needs[kZ],
                                                  .norm_weight = needs[kNormWeight],
                                                  .norm_bias = needs[kNormBias],
                                                  .proj_weight = needs[kProjWeight],
                                                  .proj_bias = needs[kProjBias]};
  const Capped i(in.i, in.gate_soft_cap), f(in.f, in.gate_soft_cap);
  const bool has_grad_out = is_present(bwd.grad_out);
  if (in.recomputes_scan && (needs_scan || (has_grad_out && end.reads_y(of_end)))) {
    const mlstm::FwdOutputs scanned = scan_forward(scan_inputs(in, i, f));
    bwd.y = scanned.out;
    bwd.divisor = scanned.divisor;
  }
  mixers::NormedProjection::Grads ended =
      end.backward(std::exchange(bwd.grad_out, {}), std::exchange(bwd.y, {}), bwd.rstd, bwd.mean, of_end);
  GradTensors grads;
  grads[kZ] = std::move(ended.z);
  grads[kNormWeight] = std::move(ended.norm_weight);
  grads[kNormBias] = std::move(ended.norm_bias);
  grads[kProjWeight] = std::move(ended.proj_weight);
  grads[kProjBias] = std::move(ended.proj_bias);
  if (!needs_scan) return grads;

  mlstm::BwdInputs scan;
  scan.in = scan_inputs(in, i, f);
  if (ended.y.defined()) scan.grad_out = in.in_heads(std::exchange(ended.y, {}));
  scan.grad_final_C = bwd.grad_C;
  scan.grad_final_n = bwd.grad_n;
  scan.divisor = bwd.divisor;
  scan.needs_grad = {needs[kQ], needs[kK], needs[kV], needs[kI], needs[kF], needs[kC], needs[kN], needs[kM]};
  static const Operator<mlstm::GradTensors, mlstm::BwdInputs> op("ssm_kernels::_mlstm_scan_bwd");
  mlstm::GradTensors of_scan = op(scan);
  scan = {};
  const std::pair<Grad, mlstm::Grad> places[] = {{kQ, mlstm::kGradQ}, {kK, mlstm::kGradK}, {kV, mlstm::kGradV},
                                                 {kI, mlstm::kGradI}, {kF, mlstm::kGradF}, {kC, mlstm::kGradC},
                                                 {kN, mlstm::kGradN}, {kM, mlstm::kGradM}};
  for (const auto& [grad, of] : places) {
    if (!needs[grad]) continue;
    grads[grad] = grad <= kV ? of_scan[of].flatten(-2) : std::move(of_scan[of]);
  }
  if (needs[kI]) grads[kI] = i.grad_of_raw(grads[kI]);
  if (needs[kF]) grads[kF] = f.grad_of_raw(grads[kF]);
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
struct MlstmMixer : DifferentiableOp<MlstmMixer, BwdInputs, std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_mlstm_mixer";
  static constexpr char kForward[] = "ssm_kernels::_mlstm_mixer_fwd", kBackward[] = "ssm_kernels::_mlstm_mixer_bwd";

  static const char* name(const Inputs&) { return "mlstm_scan"; }

  static auto differentiable(Inputs& in) { return in.differentiable(); }

  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<Outputs, Inputs> op(kForward);
    const bool is_eager = !c10::impl::dispatch_mode_enabled() && has_plain_tensors(in.tensors());
    Outputs outputs = is_eager ? mlstm_mixer::forward(in) : op(in);
    if (saved != nullptr) *saved = {outputs.y, outputs.divisor, outputs.rstd, outputs.mean};
    return {std::move(outputs.out), std::move(outputs.C), std::move(outputs.n), std::move(outputs.m)};
  }

  static GradTensors backward(BwdInputs& bwd) {
    if (!runs_eagerly() || !has_plain_tensors(std::tuple_cat(bwd.in.tensors(), bwd.saved(), bwd.grads()))) {
      return DifferentiableOp::backward(bwd);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    // The products have the dtype of forward's, wherever backward is called.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(bwd.in.q.device().type()));
    return mlstm_mixer::backward(bwd);
  }

  // The composition is mlstm_scan, layer_norm_gated and torch.nn.functional.linear.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.q, in.k, in.v, in.z);
    to.to_float_unless(to.lower, in.i, in.f, in.norm_weight, in.norm_bias);
    to.to_float(in.C, in.n, in.m);
    in.casts_projection =
        is_present(in.proj_weight) && in.q.scalar_type() == to.lower && in.proj_weight->scalar_type() != at::kDouble;
  }
};

Outputs fwd(Inputs& in) { return forward(in); }

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(MlstmMixer)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&fwd>(m, "_mlstm_mixer_fwd");
  implement<&bwd>(m, "_mlstm_mixer_bwd");
}

}  // namespace ssm_kernels::mlstm_mixer
