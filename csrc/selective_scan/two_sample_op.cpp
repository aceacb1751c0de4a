// selective_scan_two_sample on every device: checks, allocation, conversion to plain data, Meta, Autograd and Autocast.
//
// The sample before a sequence is an input of the scan, whose kernels compute the gradient of B u, (sequences, dim, dstate).
// Its contractions with B and u are the gradients of u and B there.

#include "selective_scan/two_sample_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "selective_scan/two_sample_states_at.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/complex_states.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_scan {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The selective scan with h_t = Abar(z_t) h_{t-1} + delta_t (k(z_t) B_t u_t + m(z_t) B_{t-1} u_{t-1}). The sample before the
  // first step of a sequence is that of previous_u and previous_B; else with repeats_first the first one; else zero. delta_A
  // takes the place of delta in the decay (common/separate_step.h); the discretization may then read one sample. It may, too,
  // with is_complex: A, B, C and states then hold the real and the imaginary part of each state as neighbors, dstate counts
  // both, B and C have the dtype of A, and the output is Re(C h), twice with conjugate_pairs (common/complex.h).
  const std::string tensors =
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, Tensor? initial_state, "
      "Tensor? lam, Tensor? previous_u, Tensor? previous_B, Tensor? delta_A, Tensor? seq_idx, Tensor? cu_seqlens";
  const std::string options =
      "str discretization, bool lam_sigmoid, bool repeats_first, bool delta_softplus, bool reverse, bool is_complex, bool "
      "conjugate_pairs";
  schemas.def(
      "selective_scan_two_sample(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? delta_bias=None, Tensor? initial_state=None, Tensor? lam=None, Tensor? previous_u=None, "
      "Tensor? previous_B=None, Tensor? delta_A=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, *, str discretization, "
      "bool lam_sigmoid=False, bool repeats_first=False, bool delta_softplus=False, bool reverse=False, bool "
      "is_complex=False, bool conjugate_pairs=True) -> (Tensor out, Tensor last_state)");
  schemas.refuse_nested("selective_scan_two_sample");
  // Returns the scan's results, the last sample of each sequence, and the states and samples at positions. A constant B has
  // samples without elements, and so have u and B of discretizations that read one sample.
  schemas.def("_selective_scan_two_sample_states_at(" + tensors + ", " + options +
              ", int[] states_at) -> (Tensor out, Tensor last_state, Tensor last_u, Tensor last_B, Tensor states, "
              "Tensor states_u, Tensor states_B)");
  schemas.kernels("_selective_scan_two_sample_fwd(" + tensors + ", " + options +
                  ", bool save_chunk_states) -> (Tensor out, Tensor last_state, Tensor chunk_states)");
  // Gradients that are absent or not needed have no elements. initial_state is an argument of packed calls: chunk_states have
  // that of others.
  schemas.kernels("_selective_scan_two_sample_bwd(Tensor? grad_out, Tensor? grad_last_state, " + tensors +
                  ", Tensor chunk_states, " + options +
                  ", bool[13] needs_grad) -> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
                  "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state, Tensor grad_lam, "
                  "Tensor grad_previous_u, Tensor grad_previous_B, Tensor grad_delta_A)");
}

namespace {

constexpr char kTwoSampleOp[] = "selective_scan";

}  // namespace

c10::SymInt count_sequences(const TwoSampleInputs& in) { return count_states(in.cu_seqlens, in.u.sym_size(0)); }

Discretization check_two_sample_inputs(const TwoSampleInputs& in) {
  const bool is_separate = is_present(in.delta_A);
  const auto is_any = [](Discretization) { return true; };
  const Discretization method =
      check_inputs_of(kTwoSampleOp, in, is_separate || in.is_complex ? +is_any : &is_two_sample, /*lists_all=*/true);
  if (in.is_complex) {
    check_complex_states(kTwoSampleOp, method, in.discretization, in.A.sym_size(1));
    TORCH_CHECK_NOT_IMPLEMENTED(!is_separate, kTwoSampleOp, ": delta_A is not supported with a complex A");
  }
  const ArgumentChecks checks(kTwoSampleOp, "u", in.u);
  if (is_separate) check_takes_delta_A(kTwoSampleOp, "delta_A", method, in.discretization);
  checks.tensor("delta_A", in.delta_A, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());
  TORCH_CHECK_VALUE(is_two_sample(method) || (!is_present(in.previous_u) && !is_present(in.previous_B) && !in.repeats_first),
                    kTwoSampleOp, ": expected previous with a discretization that reads two input samples, got '",
                    in.discretization, "'");
  check_lam_options(kTwoSampleOp, method, in.discretization, is_present(in.lam), in.lam_sigmoid);
  checks.tensor("lam", in.lam, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());

  check_previous(checks, in);
  return method;
}

void check_previous(const ArgumentChecks& checks, const TwoSampleInputs& in) {
  const bool is_packed = is_present(in.cu_seqlens);
  const c10::SymInt sequences = count_sequences(in);
  checks.tensor("previous_u", in.previous_u, is_packed ? "(sequences, dim)" : "(batch, dim)", {sequences, in.u.sym_size(1)},
                in.u.scalar_type());
  const at::ScalarType matrix_dtype = in.is_complex ? checks.accumulate() : in.u.scalar_type();
  const bool has_previous_B = is_present(in.previous_u) && in.B.dim() > 2;
  TORCH_CHECK_VALUE(is_present(in.previous_B) == has_previous_B, kTwoSampleOp,
                    ": expected previous_B together with previous_u, unless B is constant, got ",
                    is_present(in.previous_B) ? "previous_B" : "None", is_present(in.previous_u) ? " with" : " without",
                    " previous_u and B of shape ", in.B.sym_sizes());
  if (!has_previous_B) return;
  c10::SymDimVector shape(in.B.sym_sizes().begin(), in.B.sym_sizes().end() - 1);
  shape[0] = sequences;
  const char* const axes = in.B.dim() == 4 ? (is_packed ? "(sequences, groups, dstate)" : "(batch, groups, dstate)")
                                           : (is_packed ? "(sequences, dstate)" : "(batch, dstate)");
  checks.tensor("previous_B", in.previous_B, axes, shape, matrix_dtype);
}

TwoSampleBwd::TwoSampleBwd(const TwoSampleBwdInputs& bwd) {
  const TwoSampleInputs& in = bwd.in;
  scan.grad_out = bwd.grad_out;
  scan.grad_last_state = bwd.grad_last_state;
  scan.in = in;
  scan.in.packed_initial_state = in.is_packed() ? in.initial_state : OptionalTensor();
  scan.chunk_states = bwd.chunk_states;
  std::copy_n(bwd.needs_grad.begin(), kNumGrads, scan.needs_grad.begin());
  GradTensors first = allocate_bwd(scan);
  std::move(first.begin(), first.end(), grads.begin());
  const auto absent = [&] { return empty_tensor({0}, in.A.options()); };
  const auto needs = [&](int grad, const OptionalTensor& input) { return is_present(input) && bwd.needs_grad[grad]; };
  grads[kGradLam] = needs(kGradLam, in.lam) ? empty_tensor_like(in.u) : absent();
  grads[kGradDeltaA] = needs(kGradDeltaA, in.delta_A) ? empty_tensor_like(in.u) : absent();
  const auto like = [&](int grad, const OptionalTensor& input) {
    return needs(grad, input) ? empty_tensor(input->sym_sizes(), input->options()) : absent();
  };
  grads[kGradPreviousU] = like(kGradPreviousU, in.previous_u);
  grads[kGradPreviousB] = like(kGradPreviousB, in.previous_B);
  const bool is_read = is_present(in.previous_u) && (bwd.needs_grad[kGradPreviousU] || bwd.needs_grad[kGradPreviousB] ||
                                                     (bwd.needs_grad[kGradB] && in.B.dim() == 2));
  // Sequences without steps have no row where seq_idx cuts them.
  grad_previous =
      is_read ? at::zeros_symint({count_sequences(in), in.u.sym_size(1), in.A.sym_size(1)}, in.A.options()) : absent();
}

GradTensors TwoSampleBwd::of_scan() const {
  GradTensors first;
  std::copy_n(grads.begin(), kNumGrads, first.begin());
  return first;
}

TwoSampleGrads TwoSampleBwd::finish(const TwoSampleInputs& in) && {
  if (grad_previous.numel() == 0) {
    for (const int grad : {kGradPreviousU, kGradPreviousB}) grads[grad].zero_();
    return std::move(grads);
  }
  const at::Tensor u = in.previous_u->to(in.A.scalar_type());
  if (in.B.dim() == 2) {
    if (grads[kGradPreviousU].numel() > 0) grads[kGradPreviousU].copy_((grad_previous * in.B).sum(-1));
    if (grads[kGradB].numel() > 0) grads[kGradB].add_((grad_previous * u.unsqueeze(-1)).sum(0));
    return std::move(grads);
  }
  // (sequences, groups, channels of a group, dstate)
  const int64_t groups = in.B.dim() == 4 ? in.B.size(1) : 1;
  const at::Tensor of_groups = grad_previous.unflatten(1, {groups, u.size(1) / groups});
  if (grads[kGradPreviousU].numel() > 0) {
    const at::Tensor B = in.previous_B->to(in.A.scalar_type()).reshape({u.size(0), groups, 1, -1});
    grads[kGradPreviousU].copy_((of_groups * B).sum(-1).flatten(1));
  }
  if (grads[kGradPreviousB].numel() > 0) {
    const at::Tensor of_u = u.unflatten(1, {groups, u.size(1) / groups}).unsqueeze(-1);
    grads[kGradPreviousB].copy_((of_groups * of_u).sum(2).view_as(grads[kGradPreviousB]));
  }
  return std::move(grads);
}

TwoSampleParams make_two_sample_params(const TwoSampleInputs& in) {
  TwoSampleParams params;
  params.method = parse_method_parameters(in.discretization);
  params.lam = sequence_view(in.lam, Access::kRead, in.reverse);
  params.lam_sigmoid = in.lam_sigmoid;
  params.repeats_first = in.repeats_first;
  params.is_complex = in.is_complex;
  params.conjugate_pairs = in.conjugate_pairs;
  params.delta_A = sequence_view(in.delta_A, Access::kRead, in.reverse);
  if (is_present(in.previous_u)) {
    params.previous_u = {in.previous_u->const_data_ptr(), in.previous_u->stride(0), in.previous_u->stride(1), 0};
  }
  if (is_present(in.previous_B)) {
    const at::Tensor& B = *in.previous_B;
    params.previous_B = {B.const_data_ptr(), B.stride(0), B.dim() == 3 ? B.stride(1) : 0, B.stride(-1)};
  }
  return params;
}

TwoSampleParams make_two_sample_params(const TwoSampleInputs& in, const TwoSampleBwd& bwd) {
  TwoSampleParams params = make_two_sample_params(in);
  const auto view_of = [&](const at::Tensor& grad) {
    return grad.numel() > 0 ? sequence_view(grad, Access::kWrite, in.reverse) : SequenceView();
  };
  params.grad_lam = view_of(bwd.grads[kGradLam]);
  params.grad_delta_A = view_of(bwd.grads[kGradDeltaA]);
  if (bwd.grad_previous.numel() > 0) params.grad_previous = bwd.grad_previous.mutable_data_ptr();
  return params;
}

namespace {

// Saves the inputs and the states at the chunk boundaries, and the initial state of a packed call.
struct SelectiveScanTwoSample
    : DifferentiableOp<SelectiveScanTwoSample, TwoSampleBwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::selective_scan_two_sample";
  static constexpr char kBackward[] = "ssm_kernels::_selective_scan_two_sample_bwd";
  static constexpr bool kIsPublic = true;

  static const char* name(const Inputs&) { return kTwoSampleOp; }
  static Discretization check(const TwoSampleInputs& in) { return check_two_sample_inputs(in); }

  static auto differentiable(Inputs& in) { return in.tensors(); }

  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<FwdOutputs, TwoSampleFwdInputs> op("ssm_kernels::_selective_scan_two_sample_fwd");
    in.save_chunk_states = saved != nullptr;
    in.has_initial_state = is_present(in.initial_state);
    if (saved != nullptr && in.is_packed()) in.packed_initial_state = in.initial_state;
    FwdOutputs outputs = op(FwdCall(in));
    if (saved != nullptr) saved->push_back(std::move(outputs.chunk_states));
    return {std::move(outputs.out), std::move(outputs.last_state)};
  }

  static auto saved_fields(Inputs& in) {
    return std::tuple_cat(
        in.fields_but_state(),
        std::tie(in.packed_initial_state, in.lam, in.previous_u, in.previous_B, in.delta_A, in.seq_idx, in.cu_seqlens),
        in.options(), std::tie(in.has_initial_state));
  }

  static NeedsGrad has_edges(Inputs& in) {
    NeedsGrad edges = DifferentiableOp::has_edges(in);
    edges[kGradInitialState] = in.has_initial_state;
    return edges;
  }

  static GradTensors backward(BwdInputs& bwd) {
    bwd.in.initial_state = bwd.in.packed_initial_state;
    return DifferentiableOp::backward(bwd);
  }

  // Sequences and samples in the autocast dtype; parameters and states in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.u, in.delta, in.z, in.previous_u);
    in.is_complex ? to.to_float(in.previous_B) : to.to_lower(in.previous_B);
    to.expanded_to_lower(in.lam);
    to.expanded_to_lower(in.delta_A);
    to.to_float(in.A, in.D, in.delta_bias, in.initial_state);
    for (at::Tensor* matrix : {&in.B, &in.C}) {
      in.is_complex || matrix->dim() == 2 ? to.to_float(*matrix) : to.to_lower(*matrix);
    }
  }

 private:
  struct FwdCall : TwoSampleFwdInputs {
    explicit FwdCall(const TwoSampleInputs& in) { static_cast<TwoSampleInputs&>(*this) = in; }
  };
};

struct TwoSampleStatesAt : SampleStatesAt<SelectiveScanTwoSample> {
  static constexpr char kSchema[] = "ssm_kernels::_selective_scan_two_sample_states_at";
};

TwoSampleGrads meta_two_sample_bwd(const TwoSampleBwdInputs& bwd) {
  check_two_sample_inputs(bwd.in);
  return TwoSampleBwd(bwd).grads;
}

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(SelectiveScanTwoSample)
SSM_AUTOCAST_OPERATOR(TwoSampleStatesAt)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&TwoSampleStatesAt::call>(m, TwoSampleStatesAt::kSchema);
}

namespace {

FwdOutputs meta_two_sample_fwd(const TwoSampleFwdInputs& in) {
  check_two_sample_inputs(in);
  return allocate_fwd(in);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { register_two_sample_kernels<&meta_two_sample_fwd, &meta_two_sample_bwd>(m); }

}  // namespace ssm_kernels::selective_scan
