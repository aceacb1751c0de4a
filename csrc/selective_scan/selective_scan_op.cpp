// The selective scan's dispatcher entries that are the same for every device: checks, allocation, Meta, Autograd, Autocast.

#include "selective_scan/selective_scan_op.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "torch/arguments.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"
#include "torch/needs_autograd.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_scan {
namespace {

constexpr char kOp[] = "selective_scan";

void check_matrix(const ArgumentChecks& checks, const char* name, const at::Tensor& matrix, const Inputs& in) {
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), seqlen = in.u.sym_size(2), dstate = in.A.sym_size(1);
  switch (matrix.dim()) {
    case 2:
      return checks.tensor(name, matrix, "(dim, dstate)", {dim, dstate}, checks.accumulate());
    case 3:
      return checks.tensor(name, matrix, "(batch, dstate, seqlen)", {batch, dstate, seqlen}, in.u.scalar_type());
    case 4: {
      const c10::SymInt groups = matrix.sym_size(1);
      checks.tensor(name, matrix, "(batch, groups, dstate, seqlen)", {batch, groups, dstate, seqlen}, in.u.scalar_type());
      TORCH_CHECK_VALUE(groups > 0 && dim % groups == 0, kOp, ": expected the groups of ", name, " to divide dim = ", dim,
                        ", got ", groups);
      return;
    }
    default:
      TORCH_CHECK_VALUE(false, kOp, ": expected ", name,
                        " of shape (dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen), got ",
                        matrix.sym_sizes());
  }
}

}  // namespace

Discretization check_inputs(const Inputs& in, std::string_view discretization) {
  const ArgumentChecks checks(kOp, "u", in.u);
  checks.rank("u", in.u, 3, "(batch, dim, seqlen)");
  checks.rank("A", in.A, 2, "(dim, dstate)");
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), dstate = in.A.sym_size(1);
  const at::ScalarType dtype = in.u.scalar_type(), accumulate = checks.accumulate();
  checks.tensor("delta", in.delta, "(batch, dim, seqlen)", in.u.sym_sizes(), dtype);
  checks.tensor("A", in.A, "(dim, dstate)", {dim, dstate}, accumulate);
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, kOp, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  check_matrix(checks, "B", in.B, in);
  check_matrix(checks, "C", in.C, in);
  checks.tensor("D", in.D, "(dim,)", {dim}, accumulate);
  checks.tensor("z", in.z, "(batch, dim, seqlen)", in.u.sym_sizes(), dtype);
  checks.tensor("delta_bias", in.delta_bias, "(dim,)", {dim}, accumulate);
  checks.tensor("initial_state", in.initial_state, "(batch, dim, dstate)", {batch, dim, dstate}, accumulate);
  return parse_discretization(kOp, discretization);
}

FwdOutputs allocate_fwd(const Inputs& in, bool save_chunk_states) {
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), seqlen = in.u.sym_size(2), dstate = in.A.sym_size(1);
  const c10::SymInt boundaries = save_chunk_states ? chunk_boundary_count(seqlen, dstate) : c10::SymInt(0);
  return {at::empty_like(in.u), at::empty_symint({batch, dim, dstate}, in.A.options()),
          at::empty_symint({batch, boundaries, dim, dstate}, in.A.options())};
}

GradTensors allocate_bwd(const Inputs& in, const OptionalTensor& grad_out, const OptionalTensor& grad_last_state,
                         const at::Tensor& chunk_states, const NeedsGrad& needs_grad, const OptionalTensor& grad_z,
                         const OptionalTensor& grad_delta) {
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), seqlen = in.u.sym_size(2), dstate = in.A.sym_size(1);
  const ArgumentChecks checks("selective_scan backward", "u", in.u);
  checks.tensor("grad_out", grad_out, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());
  checks.tensor("grad_last_state", grad_last_state, "(batch, dim, dstate)", {batch, dim, dstate}, checks.accumulate());
  checks.tensor("chunk_states", chunk_states, "(batch, chunks + 1, dim, dstate)",
                {batch, chunk_boundary_count(seqlen, dstate), dim, dstate}, checks.accumulate());
  TORCH_CHECK_VALUE(is_present(in.z) || !is_present(grad_z), "selective_scan backward: expected z with grad_z, got None");
  checks.tensor("grad_z", grad_z, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());
  checks.tensor("grad_delta", grad_delta, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());

  const auto parameter = [](const at::Tensor& like) { return at::empty_symint(like.sym_sizes(), like.options()); };
  const auto sequence = [](const at::Tensor& like) { return at::empty_like(like); };
  const auto matrix = [&](const at::Tensor& like) { return like.dim() == 2 ? parameter(like) : sequence(like); };
  const auto absent = [&] { return at::empty({0}, in.A.options()); };
  const auto allocate = [&](Grad grad, const OptionalTensor& input, const auto& allocate_like) {
    return is_present(input) && needs_grad[grad] ? allocate_like(*input) : absent();
  };
  return {allocate(kGradU, in.u, sequence),
          is_present(grad_delta) ? *grad_delta : allocate(kGradDelta, in.delta, sequence),
          allocate(kGradA, in.A, parameter),
          allocate(kGradB, in.B, matrix),
          allocate(kGradC, in.C, matrix),
          allocate(kGradD, in.D, parameter),
          is_present(grad_z) ? *grad_z : allocate(kGradZ, in.z, sequence),
          allocate(kGradDeltaBias, in.delta_bias, parameter),
          needs_grad[kGradInitialState] ? at::empty_symint({batch, dim, dstate}, in.A.options()) : absent()};
}

namespace {

SequenceView sequence_view(const OptionalTensor& tensor, Access access) {
  if (!is_present(tensor)) return {};
  return {data_of(*tensor, access), tensor->stride(0), tensor->stride(1), tensor->stride(2)};
}

MatrixView matrix_view(const at::Tensor& t, Access access) {
  void* const data = data_of(t, access);
  if (t.dim() == 2) return {data, false, 1, 0, t.stride(0), t.stride(1), 0};
  if (t.dim() == 3) return {data, true, 1, t.stride(0), 0, t.stride(1), t.stride(2)};
  return {data, true, t.size(1), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

StateView state_view(const OptionalTensor& tensor) {
  if (!is_present(tensor)) return {};
  const void* const data = tensor->const_data_ptr();
  if (tensor->dim() == 2) return {data, 0, tensor->stride(0), tensor->stride(1)};
  return {data, tensor->stride(0), tensor->stride(1), tensor->stride(2)};
}

ChannelView channel_view(const OptionalTensor& tensor) {
  if (!is_present(tensor)) return {};
  return {tensor->const_data_ptr(), tensor->stride(0)};
}

// The part that forward and backward share.
void fill_params(SelectiveScanParams& params, const Inputs& in, Discretization method, bool delta_softplus) {
  params.batch = in.u.size(0);
  params.dim = in.u.size(1);
  params.seqlen = in.u.size(2);
  params.dstate = in.A.size(1);
  params.chunk_length = chunk_length(params.dstate);
  params.chunk_boundaries = chunk_boundary_count(params.seqlen, params.dstate);
  params.discretization = method;
  params.delta_softplus = delta_softplus;
  params.u = sequence_view(in.u, Access::kRead);
  params.delta = sequence_view(in.delta, Access::kRead);
  params.z = sequence_view(in.z, Access::kRead);
  params.B = matrix_view(in.B, Access::kRead);
  params.C = matrix_view(in.C, Access::kRead);
  params.A = state_view(in.A);
  params.initial_state = state_view(in.initial_state);
  params.D = channel_view(in.D);
  params.delta_bias = channel_view(in.delta_bias);
}

}  // namespace

SelectiveScanFwdParams make_fwd_params(const Inputs& in, Discretization method, bool delta_softplus,
                                       const FwdOutputs& outputs) {
  SelectiveScanFwdParams params;
  fill_params(params, in, method, delta_softplus);
  params.out = sequence_view(outputs.out, Access::kWrite);
  params.last_state = outputs.last_state.data_ptr();
  // Without boundaries to save there are none at all.
  if (outputs.chunk_states.size(1) > 0) params.chunk_states = outputs.chunk_states.data_ptr();
  return params;
}

SelectiveScanBwdParams make_bwd_params(const Inputs& in, Discretization method, bool delta_softplus,
                                       const OptionalTensor& grad_out, const OptionalTensor& grad_last_state,
                                       const at::Tensor& chunk_states, const GradTensors& grads) {
  SelectiveScanBwdParams params;
  fill_params(params, in, method, delta_softplus);
  params.grad_out = sequence_view(grad_out, Access::kRead);
  params.grad_last_state = state_view(grad_last_state);
  params.chunk_states = chunk_states.const_data_ptr();
  const auto sequence = [&](Grad grad) {
    return grads[grad].numel() > 0 ? sequence_view(grads[grad], Access::kWrite) : SequenceView();
  };
  const auto matrix = [&](Grad grad) {
    return grads[grad].numel() > 0 ? matrix_view(grads[grad], Access::kWrite) : MatrixView();
  };
  const auto pointer = [&](Grad grad) -> void* { return grads[grad].numel() > 0 ? grads[grad].mutable_data_ptr() : nullptr; };
  params.grad_u = sequence(kGradU);
  params.grad_delta = sequence(kGradDelta);
  params.grad_z = sequence(kGradZ);
  params.grad_B = matrix(kGradB);
  params.grad_C = matrix(kGradC);
  params.grad_A = pointer(kGradA);
  params.grad_D = pointer(kGradD);
  params.grad_delta_bias = pointer(kGradDeltaBias);
  params.grad_initial_state = pointer(kGradInitialState);
  return params;
}

namespace {

const c10::TypedOperatorHandle<FwdSignature>& fwd_op() {
  static const auto op = find_op<FwdSignature>("ssm_kernels::_selective_scan_fwd");
  return op;
}

const c10::TypedOperatorHandle<BwdSignature>& bwd_op() {
  static const auto op = find_op<BwdSignature>("ssm_kernels::_selective_scan_bwd");
  return op;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> fwd_meta(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                        const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                                        const OptionalTensor& z, const OptionalTensor& delta_bias,
                                                        const OptionalTensor& initial_state, std::string_view discretization,
                                                        bool, bool save_chunk_states) {
  const Inputs in{u, delta, A, B, C, D, z, delta_bias, initial_state};
  check_inputs(in, discretization);
  FwdOutputs outputs = allocate_fwd(in, save_chunk_states);
  return {outputs.out, outputs.last_state, outputs.chunk_states};
}

GradTensors compute_bwd_meta(const BwdCall& call) {
  check_inputs(call.in, call.discretization);
  return allocate_bwd(call.in, call.grad_out, call.grad_last_state, call.chunk_states, call.needs_grad, call.grad_z,
                      call.grad_delta);
}

using ScanSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                         const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                         std::string_view, bool);

const c10::TypedOperatorHandle<ScanSignature>& scan_op() {
  static const auto op = find_op<ScanSignature>("ssm_kernels::selective_scan");
  return op;
}

// Without a graph to build: forward, saving nothing.
std::tuple<at::Tensor, at::Tensor> selective_scan_no_grad(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                          const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                                          const OptionalTensor& z, const OptionalTensor& delta_bias,
                                                          const OptionalTensor& initial_state, std::string_view discretization,
                                                          bool delta_softplus) {
  check_arguments(scan_op(), {u, delta, A, B, C, D, z, delta_bias, initial_state});
  auto [out, last_state, chunk_states] =
      fwd_op().call(u, delta, A, B, C, D, z, delta_bias, initial_state, discretization, delta_softplus, false);
  return {out, last_state};
}

// Saves the inputs and the states at the chunk boundaries.
class SelectiveScan : public torch::autograd::Function<SelectiveScan> {
 public:
  // Backward calls a registered operator and nothing else, so compiled autograd may look inside.
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& u,
                                                const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
                                                const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                                const OptionalTensor& delta_bias, const OptionalTensor& initial_state,
                                                const std::string& discretization, bool delta_softplus) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, last_state, chunk_states] =
        fwd_op().call(u, delta, A, B, C, D, z, delta_bias, initial_state, discretization, delta_softplus, true);
    // In the order of Grad; in the place of the initial state, of which it is the first, chunk_states.
    ctx->save_for_backward({u, delta, A, B, C, or_undefined(D), or_undefined(z), or_undefined(delta_bias), chunk_states});
    ctx->saved_data["has_initial_state"] = or_undefined(initial_state).defined();
    ctx->saved_data["discretization"] = discretization;
    ctx->saved_data["delta_softplus"] = delta_softplus;
    ctx->set_materialize_grads(false);
    return {out, last_state};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    constexpr size_t kNumArguments = 11;  // of forward, after ctx
    torch::autograd::variable_list result(kNumArguments);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const bool has_initial_state = ctx->saved_data["has_initial_state"].toBool();
    // Inputs that are absent have no edge of the graph.
    NeedsGrad needs_grad;
    size_t edge = 0;
    for (size_t i = 0; i < kNumGrads; ++i) {
      const bool has_edge = i == kGradInitialState ? has_initial_state : saved[i].defined();
      needs_grad[i] = has_edge && ctx->needs_input_grad(edge++);
    }
    const GradTensors computed = std::apply(
        [](const auto&... grad) { return GradTensors{grad...}; },
        bwd_op().call(or_absent(grads[0]), or_absent(grads[1]), saved[kGradU], saved[kGradDelta], saved[kGradA], saved[kGradB],
                      saved[kGradC], or_absent(saved[kGradD]), or_absent(saved[kGradZ]), or_absent(saved[kGradDeltaBias]),
                      saved[kNumGrads - 1], ctx->saved_data["discretization"].toStringView(),
                      ctx->saved_data["delta_softplus"].toBool(), needs_grad));
    for (size_t i = 0; i < kNumGrads; ++i) {
      if (needs_grad[i]) result[i] = computed[i];
    }
    return result;
  }
};

std::tuple<at::Tensor, at::Tensor> selective_scan_autograd(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                           const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                                           const OptionalTensor& z, const OptionalTensor& delta_bias,
                                                           const OptionalTensor& initial_state, std::string_view discretization,
                                                           bool delta_softplus) {
  check_no_func_transform(kOp);
  check_arguments(scan_op(), {u, delta, A, B, C, D, z, delta_bias, initial_state});
  if (!any_needs_autograd(u, delta, A, B, C, D, z, delta_bias, initial_state)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return selective_scan_no_grad(u, delta, A, B, C, D, z, delta_bias, initial_state, discretization, delta_softplus);
  }
  auto outputs =
      SelectiveScan::apply(u, delta, A, B, C, D, z, delta_bias, initial_state, std::string(discretization), delta_softplus);
  return {outputs[0], outputs[1]};
}

// Sequences in the autocast dtype; parameters and states in float32.
template <at::DeviceType device_type>
std::tuple<at::Tensor, at::Tensor> selective_scan_autocast(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                           const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                                           const OptionalTensor& z, const OptionalTensor& delta_bias,
                                                           const OptionalTensor& initial_state, std::string_view discretization,
                                                           bool delta_softplus) {
  check_arguments(scan_op(), {u, delta, A, B, C, D, z, delta_bias, initial_state});
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const at::ScalarType lower = at::autocast::get_autocast_dtype(device_type);
  const auto sequence = [&](const auto& tensor) { return at::autocast::cached_cast(lower, tensor, device_type); };
  const auto parameter = [&](const auto& tensor) { return at::autocast::cached_cast(at::kFloat, tensor, device_type); };
  const auto matrix = [&](const at::Tensor& tensor) { return tensor.dim() == 2 ? parameter(tensor) : sequence(tensor); };
  return scan_op().call(sequence(u), sequence(delta), parameter(A), matrix(B), matrix(C), parameter(D), sequence(z),
                        parameter(delta_bias), parameter(initial_state), discretization, delta_softplus);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("selective_scan", &selective_scan_no_grad); }

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("selective_scan", &selective_scan_autograd);
  // The adjoint is not differentiable again: say so rather than return wrong second derivatives.
  m.impl("_selective_scan_fwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("_selective_scan_bwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("_selective_scan_bwd_out", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  m.impl("_selective_scan_fwd", &fwd_meta);
  m.impl("_selective_scan_bwd", &BwdKernels<&compute_bwd_meta>::bwd);
  m.impl("_selective_scan_bwd_out", &BwdKernels<&compute_bwd_meta>::bwd_out);
}

#ifndef SSM_KERNELS_WITH_CUDA
TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  for (const char* name : {"_selective_scan_fwd", "_selective_scan_bwd", "_selective_scan_bwd_out"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
  }
}
#endif

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) { m.impl("selective_scan", &selective_scan_autocast<at::kCPU>); }

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) { m.impl("selective_scan", &selective_scan_autocast<at::kCUDA>); }

}  // namespace ssm_kernels::selective_scan
