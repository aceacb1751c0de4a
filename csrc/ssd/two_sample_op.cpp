// ssd_chunk_scan_two_sample on every device: checks, allocation, Meta, Autograd and Autocast. The gates of the rule
// (aten/two_sample_gates.h) make it the chunked scan of given gates with a gain on the diagonal.

#include "ssd/two_sample_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ssd/aten/two_sample_gates.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/chunk_runs.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/states_at.h"

namespace ssm_kernels::ssd {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The chunked scan with S_t = e^zeta_t S_{t-1} + d_t (k(zeta_t) x_t B_t^T + m(zeta_t) x_{t-1} B_{t-1}^T), one A for a head.
  // The sample before the first step of a sequence is that of previous_x and previous_B; else with repeats_first the first one;
  // else zero. Other arguments as those of ssd_chunk_scan.
  schemas.def(
      "ssd_chunk_scan_two_sample(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *, Tensor? D=None, Tensor? z=None, "
      "Tensor? dt_bias=None, Tensor? initial_states=None, Tensor? lam=None, Tensor? previous_x=None, "
      "Tensor? previous_B=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, str discretization, bool lam_sigmoid=False, "
      "bool repeats_first=False, SymInt? chunk_size=None, bool dt_softplus=False, float[]? dt_limit=None, "
      "bool reverse=False) -> (Tensor out, Tensor final_states)");
  const std::string tensors =
      "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
      "Tensor? lam, Tensor? previous_x, Tensor? previous_B, Tensor? seq_idx, Tensor? cu_seqlens, str discretization, "
      "bool lam_sigmoid, bool repeats_first, SymInt? chunk_size, bool dt_softplus, ";
  const std::string arguments = tensors + "float dt_min, float dt_max, bool reverse";
  const std::string results = ") -> (Tensor out, Tensor final_states)";
  schemas.def("_ssd_chunk_scan_two_sample(" + arguments + results);
  // Returns the scan's results, the last sample of each sequence, and the states and samples at positions.
  schemas.def("_ssd_chunk_scan_two_sample_states_at(" + tensors +
              "float[]? dt_limit, bool reverse, int[] states_at) -> (Tensor out, Tensor final_states, Tensor last_x, "
              "Tensor last_B, Tensor states, Tensor states_x, Tensor states_B)");
  schemas.kernels("_ssd_chunk_scan_two_sample_fwd(" + arguments + results);
  // Gradients that are absent or not needed have no elements.
  schemas.kernels("_ssd_chunk_scan_two_sample_bwd(Tensor? grad_out, Tensor? grad_final_states, " + arguments +
                  ", bool[12] needs_grad) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
                  "Tensor grad_D, Tensor grad_z, Tensor grad_dt_bias, Tensor grad_initial_states, Tensor grad_lam, "
                  "Tensor grad_previous_x, Tensor grad_previous_B)");
}

Inputs TwoSampleInputs::of_scan() const {
  Inputs scan;
  scan.x = x;
  scan.dt = dt;
  scan.A = A;
  scan.B = B;
  scan.C = C;
  scan.chunk_size = chunk_size;
  scan.D = D;
  scan.z = z;
  scan.dt_bias = dt_bias;
  scan.dt_softplus = dt_softplus;
  scan.dt_min = dt_min;
  scan.dt_max = dt_max;
  scan.initial_states = initial_states;
  scan.seq_idx = seq_idx;
  scan.cu_seqlens = cu_seqlens;
  scan.are_cu_seqlens_checked = are_cu_seqlens_checked;
  scan.discretization = discretization;
  scan.reverse = reverse;
  scan.ranks = ranks;
  scan.rotation = rotation;
  return scan;
}

namespace {

constexpr char kTwoSampleScan[] = "ssd_chunk_scan";

c10::SymInt count_sequences(const TwoSampleInputs& in) { return count_states(in.cu_seqlens, in.x.sym_size(0)); }

Discretization check_two_sample_inputs(const TwoSampleInputs& in) {
  check_decay(in.discretization);
  const Discretization method = check_inputs_of(kTwoSampleScan, in.of_scan(), &is_exponential_two_sample);
  const ArgumentChecks checks(kTwoSampleScan, "x", in.x);
  const bool weighs = method == Discretization::kExpTrapezoidal;
  TORCH_CHECK_VALUE(is_present(in.lam) == weighs, kTwoSampleScan,
                    ": expected lam with discretization 'exp_trapezoidal' and no other, got '", in.discretization, "'",
                    weighs ? " without lam" : "");
  TORCH_CHECK_VALUE(weighs || !in.lam_sigmoid, kTwoSampleScan,
                    ": expected lam_sigmoid with discretization 'exp_trapezoidal' only, got '", in.discretization, "'");
  checks.tensor("lam", in.lam, "(batch, seqlen, heads)", in.dt.sym_sizes(), in.x.scalar_type());
  TORCH_CHECK_VALUE(is_present(in.previous_x) == is_present(in.previous_B), kTwoSampleScan,
                    ": expected previous_x and previous_B together, got ",
                    is_present(in.previous_x) ? "previous_x" : "previous_B", " alone");
  const bool is_packed = is_present(in.cu_seqlens);
  const c10::SymInt sequences = count_sequences(in);
  checks.tensor("previous_x", in.previous_x, is_packed ? "(sequences, heads, headdim)" : "(batch, heads, headdim)",
                {sequences, in.x.sym_size(2), in.x.sym_size(3)}, in.x.scalar_type());
  checks.tensor("previous_B", in.previous_B, is_packed ? "(sequences, groups, dstate)" : "(batch, groups, dstate)",
                {sequences, in.B.sym_size(2), in.B.sym_size(3)}, in.x.scalar_type());
  return method;
}

FwdOutputs allocate_two_sample_fwd(const TwoSampleInputs& in) { return allocate_fwd(in.of_scan()); }

TwoSampleGrads allocate_two_sample_bwd(const TwoSampleBwdInputs& bwd) {
  const TwoSampleInputs& in = bwd.in;
  BwdInputs of_scan{bwd.grad_out, bwd.grad_final_states, in.of_scan(), {}, {}, {}, {}};
  std::copy_n(bwd.needs_grad.begin(), kGradLam, of_scan.needs_grad.begin());
  for (const Grad grad : {kGradB, kGradC}) {
    if (bwd.wide_row_grads && bwd.needs_grad[grad]) of_scan.targets[grad] = empty_tensor(in.B.sym_sizes(), wide_options(in.x));
  }
  GradTensors first = allocate_bwd(of_scan);
  TwoSampleGrads grads;
  std::move(first.begin(), first.begin() + kGradLam, grads.begin());
  const auto allocate = [&](int grad, const OptionalTensor& input) {
    const bool is_needed = is_present(input) && bwd.needs_grad[grad];
    return is_needed ? empty_tensor(input->sym_sizes(), input->options()) : empty_tensor({0}, wide_options(in.x));
  };
  grads[kGradLam] = allocate(kGradLam, in.lam);
  grads[kGradPreviousX] = allocate(kGradPreviousX, in.previous_x);
  grads[kGradPreviousB] = allocate(kGradPreviousB, in.previous_B);
  return grads;
}

// The scan of given gates, without them.
Inputs without_gates(const TwoSampleInputs& in) {
  Inputs scan = in.of_scan();
  scan.dt.reset();
  scan.A.reset();
  scan.dt_bias.reset();
  scan.dt_softplus = false;
  std::tie(scan.dt_min, scan.dt_max) = std::tuple_cat(parse_dt_limit(kTwoSampleScan, std::nullopt));
  scan.discretization = "zoh";
  return scan;
}

// A call of the scan of given gates. Without steps there are no gates, and the states stay as they are.
struct GatedScan {
  Inputs scan;
  TwoSampleGates gates;

  GatedScan(const TwoSampleInputs& in, Discretization method) : scan(without_gates(in)) {
    if (in.x.size(1) == 0) {
      const at::Tensor none = empty_tensor({in.x.size(0), 0, in.x.size(2)}, wide_options(in.x));
      scan.log_decay = scan.gain = scan.diagonal_gain = none;
      return;
    }
    gates = make_two_sample_gates(in, method);
    scan.log_decay = gates.log_decay;
    scan.gain = gates.gain;
    scan.diagonal_gain = gates.diagonal_gain;
    if (has_first_states(in)) scan.initial_states = first_states(in, gates);
  }
};

FwdOutputs two_sample_fwd(const TwoSampleInputs& in) {
  if (in.x.is_meta()) return meta<check_two_sample_inputs, allocate_two_sample_fwd>(in);
  const Discretization method = check_two_sample_inputs(in);
  if (is_present(in.cu_seqlens) && in.x.is_cpu()) {
    check_cu_seqlens_values(kTwoSampleScan, *in.cu_seqlens, in.x.size(1));
  }
  return two_sample_scan(in, method);
}

TwoSampleGrads two_sample_bwd(const TwoSampleBwdInputs& bwd) {
  if (bwd.in.x.is_meta()) return meta<check_two_sample_inputs, allocate_two_sample_bwd>(bwd);
  return two_sample_scan_adjoint(bwd, check_two_sample_inputs(bwd.in));
}

}  // namespace

FwdOutputs two_sample_scan(const TwoSampleInputs& in, Discretization method) {
  const ExactProducts exact;
  return fwd(GatedScan(in, method).scan);
}

TwoSampleGrads two_sample_scan_adjoint(const TwoSampleBwdInputs& bwd, Discretization method) {
  const TwoSampleInputs& in = bwd.in;
  const TwoSampleGrads grads = allocate_two_sample_bwd(bwd);
  const auto needs = [&](int grad) { return grads[grad].numel() > 0; };
  if (in.x.size(1) == 0) {
    for (const at::Tensor& grad : grads) grad.zero_();
    if (needs(kGradInitialStates) && is_present(bwd.grad_final_states)) {
      grads[kGradInitialStates].copy_(*bwd.grad_final_states);
    }
    return grads;
  }
  const ExactProducts exact;
  const GatedScan call(in, method);
  BwdInputs of_scan{bwd.grad_out, bwd.grad_final_states, call.scan, {}, {}, {}, {}};
  for (const Grad grad : {kGradX, kGradB, kGradC, kGradD, kGradZ}) {
    of_scan.needs_grad[grad] = bwd.needs_grad[grad];
    if (needs(grad) && grad != kGradD) of_scan.targets[grad] = grads[grad];
  }
  const bool needs_gates = needs(kGradDt) || needs(kGradA) || needs(kGradDtBias) || needs(kGradLam);
  const bool needs_first = needs_gates || needs(kGradInitialStates) || needs(kGradPreviousX) || needs(kGradPreviousB);
  of_scan.needs_grad[kGradLogDecay] = of_scan.needs_grad[kGradGain] = needs_first;
  of_scan.needs_grad[kGradInitialStates] = needs_first && is_present(call.scan.initial_states);
  const at::Tensor grad_diagonal = empty_tensor(call.gates.log_decay.sym_sizes(), call.gates.log_decay.options());
  if (needs_first) of_scan.grad_diagonal_gain = grad_diagonal;
  of_scan.rank_grads = bwd.rank_grads;
  const GradTensors found = ssd::bwd(of_scan);
  if (needs(kGradD)) grads[kGradD].copy_(found[kGradD]);
  if (!needs_first) return grads;
  two_sample_gates_adjoint(in, method, call.gates, {found[kGradLogDecay], found[kGradGain], grad_diagonal},
                           of_scan.needs_grad[kGradInitialStates] ? found[kGradInitialStates] : at::Tensor(), grads);
  return grads;
}

at::Tensor last_steps(const TwoSampleInputs& in, const at::Tensor& steps, const OptionalTensor& before) {
  const c10::SymInt seqlen = steps.sym_size(1);
  c10::SymDimVector shape = {count_sequences(in), steps.sym_size(2), steps.sym_size(3)};
  const auto given = [&] { return is_present(before) ? *before : at::zeros_symint(shape, steps.options()); };
  if (seqlen == 0) return given().clone();
  if (!is_present(in.cu_seqlens)) return steps.select(1, in.reverse ? 0 : -1).clone();
  const at::Tensor begins = in.cu_seqlens->slice(0, 0, -1), ends = in.cu_seqlens->slice(0, 1);
  const at::Tensor index = in.reverse ? begins : ends - 1;
  const at::Tensor found = steps.select(0, 0).index_select(0, index.clamp(0).clamp_max(at::Scalar(seqlen - 1)));
  return at::where(ends.gt(begins).view({-1, 1, 1}), found, given());
}

namespace {

// The public operator's arguments: dt_limit in place of dt_min and dt_max.
struct PublicTwoSampleInputs : TwoSampleInputs {
  std::optional<at::ArrayRef<double>> dt_limit;

  auto fields() {
    return std::tuple_cat(tensors(), std::tie(seq_idx, cu_seqlens, discretization, lam_sigmoid, repeats_first, chunk_size,
                                              dt_softplus, dt_limit, reverse));
  }
};

// Saves the inputs and nothing else.
struct SsdChunkScanTwoSample : DifferentiableOp<SsdChunkScanTwoSample, TwoSampleBwdInputs, FwdOutputs> {
  static constexpr char kSchema[] = "ssm_kernels::_ssd_chunk_scan_two_sample";
  static constexpr char kForward[] = "ssm_kernels::_ssd_chunk_scan_two_sample_fwd";
  static constexpr char kBackward[] = "ssm_kernels::_ssd_chunk_scan_two_sample_bwd";

  static const char* name(const Inputs&) { return kTwoSampleScan; }
  static auto differentiable(Inputs& in) { return in.tensors(); }

  // Sequences and samples in the autocast dtype; parameters and states in float32.
  static void cast(TwoSampleInputs& in, const Autocast& to) {
    to.to_lower(in.x, in.dt, in.B, in.C, in.z, in.previous_x, in.previous_B);
    to.expanded_to_lower(in.lam);
    to.to_float(in.A, in.D, in.dt_bias, in.initial_states);
  }
};

const Operator<FwdOutputs, PublicTwoSampleInputs>& public_two_sample_operator() {
  static const Operator<FwdOutputs, PublicTwoSampleInputs> op("ssm_kernels::ssd_chunk_scan_two_sample");
  return op;
}

FwdOutputs ssd_chunk_scan_two_sample(PublicTwoSampleInputs& in) {
  public_two_sample_operator().check(in);
  std::tie(in.dt_min, in.dt_max) = std::tuple_cat(parse_dt_limit(kTwoSampleScan, in.dt_limit));
  return operator_of<SsdChunkScanTwoSample>()(in);
}

// The states at none of the positions, like the states of all sequences.
at::Tensor no_positions(const TwoSampleInputs& in, const at::Tensor& last) {
  c10::SymDimVector shape(last.sym_sizes().begin(), last.sym_sizes().end());
  if (is_present(in.cu_seqlens)) shape[0] = 1;
  shape.insert(shape.begin() + 1, 0);
  return last.new_empty_symint(shape);
}

// The scan, and its states and samples at positions. A composition of operators, so that autograd, vmap and exporters know only
// those.
struct SsdTwoSampleStatesAt {
  static constexpr char kSchema[] = "ssm_kernels::_ssd_chunk_scan_two_sample_states_at";
  static constexpr bool kIsPublic = false;
  struct Inputs : PublicTwoSampleInputs {
    std::vector<int64_t> states_at;

    auto fields() { return std::tuple_cat(PublicTwoSampleInputs::fields(), std::tie(states_at)); }
  };
  struct Result {
    at::Tensor out, final_states, last_x, last_B, states, states_x, states_B;

    auto fields() { return std::tie(out, final_states, last_x, last_B, states, states_x, states_B); }
  };

  static void cast(Inputs& in, const Autocast& to) {
    public_two_sample_operator().check(in);
    SsdChunkScanTwoSample::cast(in, to);
  }

  static Result call(Inputs& in) {
    public_two_sample_operator().check(in);
    std::tie(in.dt_min, in.dt_max) = std::tuple_cat(parse_dt_limit(kTwoSampleScan, in.dt_limit));
    check_two_sample_inputs(in);
    const c10::SymInt seqlen = in.x.sym_size(1);
    if (in.states_at.empty()) {
      const auto [out, final_states] = operator_of<SsdChunkScanTwoSample>()(in);
      const at::Tensor last_x = last_steps(in, in.x, in.previous_x), last_B = last_steps(in, in.B, in.previous_B);
      return {out,
              final_states,
              last_x,
              last_B,
              no_positions(in, final_states),
              no_positions(in, last_x),
              no_positions(in, last_B)};
    }
    check_states_at(kTwoSampleScan, in.states_at, seqlen, in.reverse);
    // The states of each piece, of sequences that have not begun too, are S, x and B.
    const c10::SymDimVector state_shape = {count_sequences(in), in.x.sym_size(2), in.x.sym_size(3), in.B.sym_size(3)};
    const std::vector<at::Tensor> first = {
        is_present(in.initial_states) ? *in.initial_states : at::zeros_symint(state_shape, wide_options(in.x)),
        before_sequences(in, in.x, in.previous_x), before_sequences(in, in.B, in.previous_B)};
    const auto scan = [&](const Piece& piece) -> std::vector<at::Tensor> {
      TwoSampleInputs part = in;
      piece.cut(1, part.x, part.dt, part.B, part.C, part.z, part.lam, part.seq_idx);
      part.initial_states = piece.state();
      part.previous_x = piece.state(1);
      part.previous_B = piece.state(2);
      part.cu_seqlens = piece.cu_seqlens;
      const auto [out, final_states] = operator_of<SsdChunkScanTwoSample>()(part);
      return {out, final_states, last_steps(part, part.x, part.previous_x), last_steps(part, part.B, part.previous_B)};
    };
    const auto first_sample = [&](size_t i, int64_t step) -> OptionalTensor {
      if (i == 0 || !in.repeats_first) return std::nullopt;
      return (i == 1 ? in.x : in.B).select(1, step);
    };
    const SeveralStatesAt found =
        scan_pieces({seqlen, 1, false, first, in.seq_idx, in.cu_seqlens, scan, {0, 0, 0}, first_sample}, in.states_at);
    return {found.out, found.last[0], found.last[1], found.last[2], found.states[0], found.states[1], found.states[2]};
  }

 private:
  // The samples before the sequences, which with repeats_first are their first ones.
  static at::Tensor before_sequences(const TwoSampleInputs& in, const at::Tensor& steps, const OptionalTensor& given) {
    if (is_present(given)) return *given;
    TwoSampleInputs first = in;
    first.reverse = true;  // whose last step is step 0
    if (in.repeats_first) return last_steps(first, steps, {});
    return at::zeros_symint({count_sequences(in), steps.sym_size(2), steps.sym_size(3)}, steps.options());
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&ssd_chunk_scan_two_sample>(m, "ssd_chunk_scan_two_sample");
  implement<&SsdTwoSampleStatesAt::call>(m, SsdTwoSampleStatesAt::kSchema);
}

SSM_DIFFERENTIABLE_OPERATOR(SsdChunkScanTwoSample)
SSM_AUTOCAST_OPERATOR(SsdTwoSampleStatesAt)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&two_sample_fwd>(m, "_ssd_chunk_scan_two_sample_fwd");
  implement<&two_sample_bwd>(m, "_ssd_chunk_scan_two_sample_bwd");
}

}  // namespace ssm_kernels::ssd
