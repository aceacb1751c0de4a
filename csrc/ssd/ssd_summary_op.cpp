// ssd_chunk_scan_summary on every device: checks, allocation, Meta, Autograd and Autocast. On CUDA the final states, and the
// gradient of the states before a span, come from the kernels of span_states.cuh; everything else is matmuls.

#include <torch/library.h>

#include "ssd/aten/summary.h"
#include "ssd/ssd_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/schemas.h"

namespace ssm_kernels::ssd {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The summary of a span of steps: the final states from zero, and the decay e^(sum of zeta), zero where a sequence begins.
  // The same with all arguments positional, forward alone, and its adjoint.
  const std::string ssd_summary_results = " -> (Tensor final_states, Tensor decay)";
  schemas.def(
      "ssd_chunk_scan_summary(Tensor x, Tensor? dt, Tensor? A, Tensor B, *, Tensor? dt_bias=None, bool dt_softplus=False, "
      "float[]? dt_limit=None, str discretization='zoh', Tensor? seq_idx=None, Tensor? log_decay=None, "
      "Tensor? gain=None)" +
      ssd_summary_results);
  const std::string ssd_summary_arguments =
      "Tensor x, Tensor? dt, Tensor? A, Tensor B, Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max, "
      "Tensor? seq_idx, str discretization, Tensor? log_decay, Tensor? gain";
  schemas.def("_ssd_chunk_scan_summary(" + ssd_summary_arguments + ")" + ssd_summary_results);
  schemas.kernels("_ssd_chunk_scan_summary_fwd(" + ssd_summary_arguments + ")" + ssd_summary_results);
  schemas.kernels("_ssd_chunk_scan_summary_bwd(Tensor? grad_final_states, Tensor? grad_decay, " + ssd_summary_arguments +
                  ", bool[7] needs_grad) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_dt_bias, "
                  "Tensor grad_log_decay, Tensor grad_gain)");
  // The gradient of the states before a span, from the gradients of S C: sum over t of e^(sum of zeta up to t) grad_out_t
  // C_t^T, over the steps of the first sequence.
  schemas.kernels(
      "_ssd_chunk_scan_initial_gradient(Tensor grad_out, Tensor? dt, Tensor? A, Tensor C, Tensor? dt_bias, bool dt_softplus, "
      "float dt_min, float dt_max, Tensor? seq_idx, str discretization, Tensor? log_decay, Tensor? gain) -> Tensor");
}

namespace {

constexpr char kSummaryOp[] = "ssd_chunk_scan_summary";

}  // namespace

Inputs SummaryInputs::scan() const {
  Inputs scan;
  scan.x = x;
  scan.dt = dt;
  scan.A = A;
  scan.B = B;
  scan.C = B;
  scan.dt_bias = dt_bias;
  scan.dt_softplus = dt_softplus;
  scan.dt_min = dt_min;
  scan.dt_max = dt_max;
  scan.seq_idx = seq_idx;
  scan.discretization = discretization;
  scan.log_decay = log_decay;
  scan.gain = gain;
  return scan;
}

namespace {

Discretization check_summary_inputs(const SummaryInputs& in) { return check_inputs_of(kSummaryOp, in.scan()); }

SummaryOutputs allocate_summary(const SummaryInputs& in) {
  const c10::SymInt batch = in.x.sym_size(0), heads = in.x.sym_size(2), headdim = in.x.sym_size(3), dstate = in.B.sym_size(3);
  return {empty_tensor({batch, heads, headdim, dstate}, wide_options(in.x)), empty_tensor({batch, heads}, wide_options(in.x))};
}

SummaryGrads allocate_summary_bwd(const SummaryBwdInputs& bwd) {
  const SummaryInputs& in = bwd.in;
  const ArgumentChecks checks("ssd_chunk_scan_summary backward", "x", in.x);
  const c10::SymInt batch = in.x.sym_size(0), heads = in.x.sym_size(2), headdim = in.x.sym_size(3), dstate = in.B.sym_size(3);
  checks.tensor("grad_final_states", bwd.grad_final_states, "(batch, heads, headdim, dstate)", {batch, heads, headdim, dstate},
                checks.accumulate());
  checks.tensor("grad_decay", bwd.grad_decay, "(batch, heads)", {batch, heads}, checks.accumulate());
  const auto allocate = [&](SummaryGrad grad, const OptionalTensor& input, const auto& allocate_like) {
    return is_present(input) && bwd.needs_grad[grad] ? allocate_like(*input) : empty_tensor({0}, wide_options(in.x));
  };
  return {allocate(kSummaryGradX, in.x, empty_tensor_like),
          allocate(kSummaryGradDt, in.dt, empty_tensor_like),
          allocate(kSummaryGradA, in.A, empty_contiguous_like),
          allocate(kSummaryGradB, in.B, empty_tensor_like),
          allocate(kSummaryGradDtBias, in.dt_bias, empty_contiguous_like),
          allocate(kSummaryGradLogDecay, in.log_decay, empty_tensor_like),
          allocate(kSummaryGradGain, in.gain, empty_tensor_like)};
}

// Whether kernels wrote the states: of span_states_cuda. They write the decay too, if it is defined.
bool write_span_states(const Inputs& scan, Discretization method, bool is_reverse, const at::Tensor& states,
                       const at::Tensor& decay = {}) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (scan.x.is_cuda()) return span_states_cuda(scan, method, is_reverse, states, decay);
#endif
  return false;
}

SummaryOutputs summary_fwd(const SummaryInputs& in) {
  if (in.x.is_meta()) return meta<check_summary_inputs, allocate_summary>(in);
  const Discretization method = check_summary_inputs(in);
  SummaryOutputs outputs = allocate_summary(in);
  Inputs scan = in.scan();
  if (!write_span_states(scan, method, /*is_reverse=*/false, outputs.final_states, outputs.decay)) {
    scan.C.reset();
    summary_aten(scan, method, outputs);
  }
  return outputs;
}

SummaryGrads summary_bwd(const SummaryBwdInputs& bwd) {
  if (bwd.in.x.is_meta()) return meta<check_summary_inputs, allocate_summary_bwd>(bwd);
  const Discretization method = check_summary_inputs(bwd.in);
  SummaryGrads grads = allocate_summary_bwd(bwd);
  summary_adjoint_aten(bwd, method, grads);
  return grads;
}

// With the gradients of outputs in the place of x, and C in that of B.
Discretization check_initial_gradient_inputs(const SummaryInputs& in) {
  return check_inputs_of("ssd_chunk_scan's initial gradient", in.scan());
}

at::Tensor allocate_initial_gradient(const SummaryInputs& in) { return allocate_summary(in).final_states; }

at::Tensor initial_gradient(const SummaryInputs& in) {
  if (in.x.is_meta()) return meta<check_initial_gradient_inputs, allocate_initial_gradient>(in);
  const Discretization method = check_initial_gradient_inputs(in);
  const Inputs scan = in.scan();
  at::Tensor result = allocate_initial_gradient(in);
  if (!write_span_states(scan, method, /*is_reverse=*/true, result)) result = initial_gradient_aten(scan, method);
  return result;
}

// The public operator's arguments: dt_limit in place of dt_min and dt_max.
struct PublicSummaryInputs : SummaryInputs {
  std::optional<at::ArrayRef<double>> dt_limit;

  auto fields() { return std::tie(x, dt, A, B, dt_bias, dt_softplus, dt_limit, discretization, seq_idx, log_decay, gain); }
};
using SummaryResult = std::tuple<at::Tensor, at::Tensor>;

// Saves the inputs and nothing else.
struct SsdChunkScanSummary : DifferentiableOp<SsdChunkScanSummary, SummaryBwdInputs, SummaryResult> {
  static constexpr char kSchema[] = "ssm_kernels::_ssd_chunk_scan_summary";
  static constexpr char kForward[] = "ssm_kernels::_ssd_chunk_scan_summary_fwd",
                        kBackward[] = "ssm_kernels::_ssd_chunk_scan_summary_bwd";

  static const char* name(const Inputs&) { return kSummaryOp; }
  static auto differentiable(Inputs& in) { return std::tie(in.x, in.dt, in.A, in.B, in.dt_bias, in.log_decay, in.gain); }

  // Sequences in the autocast dtype; parameters, log decays and gains in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.dt, in.B);
    to.to_float(in.A, in.dt_bias, in.log_decay, in.gain);
  }
};

SummaryResult ssd_chunk_scan_summary(PublicSummaryInputs& in) {
  static const Operator<SummaryResult, PublicSummaryInputs> op("ssm_kernels::ssd_chunk_scan_summary");
  op.check(in);
  std::tie(in.dt_min, in.dt_max) = std::tuple_cat(parse_dt_limit(kSummaryOp, in.dt_limit));
  return operator_of<SsdChunkScanSummary>()(in);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&ssd_chunk_scan_summary>(m, "ssd_chunk_scan_summary");
}

SSM_DIFFERENTIABLE_OPERATOR(SsdChunkScanSummary)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&summary_fwd>(m, "_ssd_chunk_scan_summary_fwd");
  implement<&summary_bwd>(m, "_ssd_chunk_scan_summary_bwd");
  implement<&initial_gradient>(m, "_ssd_chunk_scan_initial_gradient");
}

}  // namespace ssm_kernels::ssd
