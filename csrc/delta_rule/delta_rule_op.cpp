// delta_rule_scan, the recurrence of DeltaNet, Gated DeltaNet, Kimi Delta Attention and DeltaProduct, on every device: checks,
// allocation, Meta, Autograd and Autocast.

#include "delta_rule/delta_rule_op.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "delta_rule/aten/chunked_scan.h"
#include "delta_rule/cuda/bwd_cuda.h"
#include "delta_rule/cuda/fwd_cuda.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/states_at.h"

namespace ssm_kernels::delta_rule {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The delta rule in chunks (DeltaNet; with g Gated DeltaNet or, one a channel of the key, KDA; with several updates of a step
  // DeltaProduct): S <- S Diag(e^g_t), S <- S + beta_t (v_t - S k_t) k_t^T, out = scale S q_t. With reverse, time runs from the
  // last step to the first. With A_log or gate_lower_bound, g is raw.
  schemas.def(
      "delta_rule_scan(Tensor q, Tensor k, Tensor v, Tensor beta, *, Tensor? g=None, float? scale=None, "
      "Tensor? initial_states=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, int[] states_at=[], bool reverse=False, "
      "int num_householder=1, bool qk_l2norm=False, Tensor? A_log=None, Tensor? dt_bias=None, float? gate_lower_bound=None, "
      "bool beta_sigmoid=False, bool allow_neg_eigval=False) -> (Tensor out, Tensor final_states, Tensor states)");
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone.
  const std::string arguments =
      "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, float? scale, Tensor? initial_states, Tensor? seq_idx, "
      "Tensor? cu_seqlens, int[] states_at, bool reverse, int num_householder, bool qk_l2norm, Tensor? A_log, Tensor? dt_bias, "
      "float? gate_lower_bound, bool beta_sigmoid, bool allow_neg_eigval";
  const std::string results = ") -> (Tensor out, Tensor final_states, Tensor states)";
  schemas.def("_delta_rule_scan(" + arguments + results);
  schemas.kernels("_delta_rule_scan_fwd(" + arguments + results);
  // Its adjoint, which recomputes what it needs of forward. Gradients that are absent or not needed have no elements.
  schemas.kernels("_delta_rule_scan_bwd(Tensor? grad_out, Tensor? grad_final_states, Tensor? grad_states, " + arguments +
                  ", bool[8] needs_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_beta, Tensor grad_g, "
                  "Tensor grad_initial_states, Tensor grad_A_log, Tensor grad_dt_bias)");
}

namespace {

constexpr char kOp[] = "delta_rule_scan";
constexpr char kQueries[] = "(batch, seqlen, heads, key_dim)";
constexpr char kKeys[] = "(batch, num_householder * seqlen, heads, key_dim)";
constexpr char kValues[] = "(batch, num_householder * seqlen, value_heads, value_dim)";

// The value of a step's g by channel or by head, without the axes of batch and time.
std::vector<c10::SymInt> gate_shape(const Inputs& in) {
  std::vector<c10::SymInt> shape = {in.v.sym_size(2)};
  if (in.has_gate_per_channel()) shape.push_back(in.q.sym_size(3));
  return shape;
}

const char* states_axes(const Inputs& in) {
  return is_present(in.cu_seqlens) ? "(sequences, value_heads, value_dim, key_dim)"
                                   : "(batch, value_heads, value_dim, key_dim)";
}

std::vector<c10::SymInt> states_shape(const Inputs& in) {
  return {count_states(in.cu_seqlens, in.q.sym_size(0)), in.v.sym_size(2), in.v.sym_size(3), in.q.sym_size(3)};
}

std::vector<c10::SymInt> chosen_states_shape(const Inputs& in) {
  return {in.q.sym_size(0), static_cast<int64_t>(in.states_at.size()), in.v.sym_size(2), in.v.sym_size(3), in.q.sym_size(3)};
}

at::TensorOptions states_options(const Inputs& in) { return in.q.options().dtype(accumulate_type(in.q.scalar_type())); }

void check_options(const Inputs& in) {
  TORCH_CHECK_VALUE(in.num_householder >= 1, kOp, ": expected num_householder of at least 1, got ", in.num_householder);
  TORCH_CHECK_VALUE(!in.scale.has_value() || std::isfinite(*in.scale), kOp, ": expected a finite scale, got ",
                    in.scale.value_or(0));
  TORCH_CHECK_VALUE(in.beta_sigmoid || !in.allow_neg_eigval, kOp,
                    ": expected allow_neg_eigval with beta_sigmoid, whose result it doubles; otherwise pass 2 * beta");
}

void check_gate(const ArgumentChecks& checks, const Inputs& in, c10::SymInt batch, c10::SymInt seqlen) {
  if (is_present(in.g)) {
    TORCH_CHECK_VALUE(in.g->dim() == 3 || in.g->dim() == 4, kOp,
                      ": expected g of shape (batch, seqlen, value_heads) or (batch, seqlen, value_heads, key_dim), got ",
                      in.g->sym_sizes());
    std::vector<c10::SymInt> shape = gate_shape(in);
    const char* const axes =
        in.has_gate_per_channel() ? "(batch, seqlen, value_heads, key_dim)" : "(batch, seqlen, value_heads)";
    shape.insert(shape.begin(), {batch, seqlen});
    checks.parameter("g", in.g, axes, shape);
  }
  TORCH_CHECK_VALUE(is_present(in.g) || !in.has_raw_gate(), kOp, ": expected g with ",
                    is_present(in.A_log) ? "A_log" : "gate_lower_bound", ", which make a gate of it");
  TORCH_CHECK_VALUE(in.has_raw_gate() || !is_present(in.dt_bias), kOp,
                    ": expected dt_bias with A_log or gate_lower_bound, as it is added to a raw g");
  checks.tensor("A_log", in.A_log, "(value_heads,)", {in.v.sym_size(2)}, checks.accumulate());
  checks.tensor("dt_bias", in.dt_bias, in.has_gate_per_channel() ? "(value_heads, key_dim)" : "(value_heads,)", gate_shape(in),
                checks.accumulate());
  TORCH_CHECK_VALUE(!in.gate_lower_bound.has_value() || (*in.gate_lower_bound < 0 && std::isfinite(*in.gate_lower_bound)), kOp,
                    ": expected a negative, finite gate_lower_bound, got ", in.gate_lower_bound.value_or(0));
}

void check_positions(const Inputs& in, const c10::SymInt& seqlen) {
  if (in.states_at.empty()) return;
  check_states_at(kOp, in.states_at, seqlen, in.reverse);
  const bool ascends =
      std::adjacent_find(in.states_at.begin(), in.states_at.end(), std::greater_equal<>()) == in.states_at.end();
  TORCH_CHECK_VALUE(ascends, kOp, ": expected states_at in ascending order, got ", at::IntArrayRef(in.states_at));
}

}  // namespace

double scale_of(const Inputs& in) {
  return in.scale.has_value() ? *in.scale : 1 / std::sqrt(static_cast<double>(in.q.size(3)));
}

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "q", in.q);
  checks.rank("q", in.q, 4, kQueries);
  checks.rank("v", in.v, 4, kValues);
  check_options(in);
  const c10::SymInt batch = in.q.sym_size(0), seqlen = in.q.sym_size(1), heads = in.q.sym_size(2), key_dim = in.q.sym_size(3);
  const c10::SymInt value_heads = in.v.sym_size(2), value_dim = in.v.sym_size(3), steps = seqlen * in.num_householder;
  const at::ScalarType dtype = in.q.scalar_type();
  TORCH_CHECK_VALUE(key_dim >= 1, kOp, ": expected key_dim of at least 1, got q of shape ", in.q.sym_sizes());
  TORCH_CHECK_VALUE(value_dim >= 1, kOp, ": expected value_dim of at least 1, got v of shape ", in.v.sym_sizes());
  TORCH_CHECK_VALUE(heads > 0 && value_heads % heads == 0, kOp, ": expected the heads of q and k to divide those of v, got ",
                    heads, " and ", value_heads);
  checks.tensor("k", in.k, kKeys, {batch, steps, heads, key_dim}, dtype);
  checks.tensor("v", in.v, kValues, {batch, steps, value_heads, value_dim}, dtype);
  checks.parameter("beta", in.beta, "(batch, num_householder * seqlen, value_heads)", {batch, steps, value_heads});
  check_gate(checks, in, batch, seqlen);
  check_sequences(checks, in.seq_idx, in.cu_seqlens, batch, seqlen);
  checks.tensor("initial_states", in.initial_states, states_axes(in), states_shape(in), checks.accumulate());
  check_positions(in, seqlen);
}

FwdOutputs allocate_fwd(const Inputs& in) {
  // The layout of v, as far as it has as many steps.
  at::Tensor out = in.num_householder == 1
                       ? empty_tensor_like(in.v)
                       : empty_tensor({in.q.sym_size(0), in.q.sym_size(1), in.v.sym_size(2), in.v.sym_size(3)}, in.v.options());
  const at::TensorOptions options = states_options(in);
  return {out, empty_tensor(states_shape(in), options), empty_tensor(chosen_states_shape(in), options)};
}

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const ArgumentChecks checks("delta_rule_scan backward", "q", in.q);
  checks.tensor("grad_out", bwd.grad_out, "(batch, seqlen, value_heads, value_dim)",
                {in.q.sym_size(0), in.q.sym_size(1), in.v.sym_size(2), in.v.sym_size(3)}, in.q.scalar_type());
  checks.tensor("grad_final_states", bwd.grad_final_states, states_axes(in), states_shape(in), checks.accumulate());
  checks.tensor("grad_states", bwd.grad_states, "(batch, positions, value_heads, value_dim, key_dim)", chosen_states_shape(in),
                checks.accumulate());

  const auto allocate = [&](Grad grad, const OptionalTensor& input, const auto& allocate_like) {
    const bool is_needed = is_present(input) && bwd.needs_grad[grad];
    return is_needed ? allocate_like(*input) : empty_tensor({0}, states_options(in));
  };
  return {allocate(kGradQ, in.q, empty_tensor_like),
          allocate(kGradK, in.k, empty_tensor_like),
          allocate(kGradV, in.v, empty_tensor_like),
          allocate(kGradBeta, in.beta, empty_tensor_like),
          allocate(kGradG, in.g, empty_tensor_like),
          allocate(kGradInitialStates, in.initial_states, empty_contiguous_like),
          allocate(kGradALog, in.A_log, empty_contiguous_like),
          allocate(kGradDtBias, in.dt_bias, empty_contiguous_like)};
}

FwdOutputs fwd(const Inputs& in) {
  if (in.q.is_meta()) return meta<check_inputs, allocate_fwd>(in);
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda() && fwd_kernels_for(in) != Kernels::kNone) return fwd_cuda(in);
#endif
  return fwd_aten(in);
}

GradTensors bwd(const BwdInputs& bwd) {
  if (bwd.in.q.is_meta()) return meta<check_inputs, allocate_bwd>(bwd);
#ifdef SSM_KERNELS_WITH_CUDA
  if (bwd.in.q.is_cuda() && have_bwd_kernels_for(bwd)) return bwd_cuda(bwd);
#endif
  return bwd_aten(bwd);
}

namespace {

struct DeltaRuleScan : DifferentiableOp<DeltaRuleScan, BwdInputs, FwdOutputs> {
  static constexpr char kSchema[] = "ssm_kernels::_delta_rule_scan";
  static constexpr char kForward[] = "ssm_kernels::_delta_rule_scan_fwd", kBackward[] = "ssm_kernels::_delta_rule_scan_bwd";

  static const char* name(const Inputs&) { return kOp; }

  static auto differentiable(Inputs& in) {
    return std::tie(in.q, in.k, in.v, in.beta, in.g, in.initial_states, in.A_log, in.dt_bias);
  }

  // Sequences in the autocast dtype, parameters and states in float32. beta and g keep float32: log decays near zero have few
  // digits otherwise.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.q, in.k, in.v);
    to.to_float_unless(to.lower, in.beta, in.g);
    to.to_float(in.initial_states, in.A_log, in.dt_bias);
  }
};

FwdOutputs delta_rule_scan(Inputs& in) {
  static const Operator<FwdOutputs, Inputs> op("ssm_kernels::delta_rule_scan");
  op.check(in);
  return operator_of<DeltaRuleScan>()(in);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { implement<&delta_rule_scan>(m, "delta_rule_scan"); }

SSM_DIFFERENTIABLE_OPERATOR(DeltaRuleScan)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&fwd>(m, "_delta_rule_scan_fwd");
  implement<&bwd>(m, "_delta_rule_scan_bwd");
}

}  // namespace ssm_kernels::delta_rule
