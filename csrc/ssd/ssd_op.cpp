// The dispatcher entries of the chunked scan of structured state-space duality (SSD) that are the same for every device:
// checks, allocation, Meta, Autograd, Autocast; and what registers the devices' own.

#include "ssd/ssd_op.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "common/limits.h"
#include "ssd/aten/chunked_scan.h"
#include "torch/arguments.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"
#include "torch/needs_autograd.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
namespace {

constexpr char kOp[] = "ssd_chunk_scan";
constexpr char kSequence[] = "(batch, seqlen, heads, headdim)";
constexpr char kMatrix[] = "(batch, seqlen, groups, dstate)";

const char* states_axes(const Inputs& in) {
  return is_present(in.cu_seqlens) ? "(sequences, heads, headdim, dstate)" : "(batch, heads, headdim, dstate)";
}

std::vector<c10::SymInt> states_shape(const Inputs& in) {
  return {in.sequences(), in.x.sym_size(2), in.x.sym_size(3), in.B.sym_size(3)};
}

// Chunks are joined by exponentials of sums over time, which other methods do not have.
bool is_exponential(Discretization discretization) {
  bool result = false;
  visit_discretization(discretization, [&](auto method) { result = decltype(method)::kExponential; });
  return result;
}

void check_options(const Inputs& in) {
  if (in.chunk_size.has_value()) {
    TORCH_CHECK_VALUE(*in.chunk_size >= 1, kOp, ": expected chunk_size of at least 1, got ", *in.chunk_size);
  }
  check_dt_limit(kOp, in.dt_min, in.dt_max);
  TORCH_CHECK_VALUE(!is_present(in.seq_idx) || !is_present(in.cu_seqlens), kOp,
                    ": expected seq_idx or cu_seqlens, got both: each says where sequences begin");
}

}  // namespace

Inputs name_inputs(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                   std::optional<c10::SymInt> chunk_size, const OptionalTensor& D, const OptionalTensor& z,
                   const OptionalTensor& dt_bias, bool dt_softplus, double dt_min, double dt_max,
                   const OptionalTensor& initial_states, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                   std::string_view discretization) {
  Inputs in;
  in.x = x;
  in.dt = dt;
  in.A = A;
  in.B = B;
  in.C = C;
  in.chunk_size = std::move(chunk_size);
  in.D = D;
  in.z = z;
  in.dt_bias = dt_bias;
  in.dt_softplus = dt_softplus;
  in.dt_min = dt_min;
  in.dt_max = dt_max;
  in.initial_states = initial_states;
  in.seq_idx = seq_idx;
  in.cu_seqlens = cu_seqlens;
  in.discretization = discretization;
  return in;
}

BwdInputs name_inputs(const OptionalTensor& grad_out, const OptionalTensor& grad_final_states, const at::Tensor& x,
                      const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                      std::optional<c10::SymInt> chunk_size, const OptionalTensor& D, const OptionalTensor& z,
                      const OptionalTensor& dt_bias, bool dt_softplus, double dt_min, double dt_max,
                      const OptionalTensor& initial_states, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                      std::string_view discretization, NeedsGrad needs_grad) {
  BwdInputs bwd;
  bwd.grad_out = grad_out;
  bwd.grad_final_states = grad_final_states;
  bwd.in = name_inputs(x, dt, A, B, C, std::move(chunk_size), D, z, dt_bias, dt_softplus, dt_min, dt_max, initial_states,
                       seq_idx, cu_seqlens, discretization);
  bwd.needs_grad = needs_grad;
  return bwd;
}

c10::SymInt Inputs::sequences() const { return is_present(cu_seqlens) ? cu_seqlens->sym_size(0) - 1 : x.sym_size(0); }

Discretization check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "x", in.x);
  checks.rank("x", in.x, 4, kSequence);
  checks.rank("B", in.B, 4, kMatrix);
  const c10::SymInt batch = in.x.sym_size(0), seqlen = in.x.sym_size(1), heads = in.x.sym_size(2), headdim = in.x.sym_size(3);
  const c10::SymInt groups = in.B.sym_size(2), dstate = in.B.sym_size(3);
  const at::ScalarType dtype = in.x.scalar_type(), accumulate = checks.accumulate();
  TORCH_CHECK_VALUE(headdim >= 1 && headdim <= kMaxHeaddim, kOp, ": expected headdim from 1 to ", kMaxHeaddim, ", got ",
                    headdim);
  checks.tensor("dt", in.dt, "(batch, seqlen, heads)", {batch, seqlen, heads}, dtype);
  checks.tensor("A", in.A, "(heads,)", {heads}, accumulate);
  checks.tensor("B", in.B, kMatrix, {batch, seqlen, groups, dstate}, dtype);
  TORCH_CHECK_VALUE(groups > 0 && heads % groups == 0, kOp, ": expected the groups of B and C to divide heads = ", heads,
                    ", got ", groups);
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, kOp, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  checks.tensor("C", in.C, kMatrix, in.B.sym_sizes(), dtype);
  if (is_present(in.D)) {
    const c10::SymIntArrayRef shape = in.D->sym_sizes();
    const bool is_right =
        (shape.size() == 1 && shape[0] == heads) || (shape.size() == 2 && shape[0] == heads && shape[1] == headdim);
    TORCH_CHECK_VALUE(is_right, kOp, ": expected D of shape (heads,) = [", heads, "] or (heads, headdim) = [", heads, ", ",
                      headdim, "], got ", shape);
    checks.tensor("D", in.D, "(heads,) or (heads, headdim)", shape, accumulate);
  }
  checks.tensor("z", in.z, kSequence, in.x.sym_sizes(), dtype);
  checks.tensor("dt_bias", in.dt_bias, "(heads,)", {heads}, accumulate);
  check_options(in);
  if (is_present(in.seq_idx)) {
    checks.shape("seq_idx", *in.seq_idx, "(batch, seqlen)", {batch, seqlen});
    checks.index_dtype("seq_idx", *in.seq_idx);
    checks.device("seq_idx", *in.seq_idx);
  }
  if (is_present(in.cu_seqlens)) {
    check_cu_seqlens_argument(checks, kOp, *in.cu_seqlens, batch);
    TORCH_CHECK_VALUE(in.sequences() >= 1 || seqlen == 0, kOp, ": expected cu_seqlens to end at seqlen = ", seqlen,
                      ", got 0 sequences");
  }
  checks.tensor("initial_states", in.initial_states, states_axes(in), states_shape(in), accumulate);
  return parse_discretization(kOp, in.discretization, &is_exponential);
}

FwdOutputs allocate_fwd(const Inputs& in) { return {at::empty_like(in.x), at::empty_symint(states_shape(in), in.A.options())}; }

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const ArgumentChecks checks("ssd_chunk_scan backward", "x", in.x);
  checks.tensor("grad_out", bwd.grad_out, kSequence, in.x.sym_sizes(), in.x.scalar_type());
  checks.tensor("grad_final_states", bwd.grad_final_states, states_axes(in), states_shape(in), checks.accumulate());

  const auto like = [](const at::Tensor& tensor) { return at::empty_like(tensor); };
  const auto contiguous_like = [](const at::Tensor& tensor) {
    return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
  };
  const auto allocate = [&](Grad grad, const OptionalTensor& input, const auto& allocate_like) {
    const bool is_needed = is_present(input) && bwd.needs_grad[grad];
    if (is_needed && is_present(bwd.targets[grad])) return *bwd.targets[grad];
    return is_needed ? allocate_like(*input) : at::empty({0}, in.A.options());
  };
  return {allocate(kGradX, in.x, like),
          allocate(kGradDt, in.dt, like),
          allocate(kGradA, in.A, contiguous_like),
          allocate(kGradB, in.B, like),
          allocate(kGradC, in.C, like),
          allocate(kGradD, in.D, contiguous_like),
          allocate(kGradZ, in.z, like),
          allocate(kGradDtBias, in.dt_bias, contiguous_like),
          allocate(kGradInitialStates, in.initial_states, contiguous_like)};
}

namespace {

FwdResult fwd_meta(const Inputs& in) {
  check_inputs(in);
  FwdOutputs outputs = allocate_fwd(in);
  return {outputs.out, outputs.final_states};
}

BwdResult bwd_meta(const BwdInputs& bwd) {
  check_inputs(bwd.in);
  return std::tuple_cat(allocate_bwd(bwd));
}

const c10::TypedOperatorHandle<FwdSignature>& fwd_op() {
  static const auto op = find_op<FwdSignature>("ssm_kernels::_ssd_chunk_scan_fwd");
  return op;
}

FwdResult call(const c10::TypedOperatorHandle<FwdSignature>& op, const Inputs& in) {
  return op.call(in.x, in.dt, in.A, in.B, in.C, in.chunk_size, in.D, in.z, in.dt_bias, in.dt_softplus, in.dt_min, in.dt_max,
                 in.initial_states, in.seq_idx, in.cu_seqlens, in.discretization);
}

BwdResult call(const c10::TypedOperatorHandle<BwdSignature>& op, const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  return op.call(bwd.grad_out, bwd.grad_final_states, in.x, in.dt, in.A, in.B, in.C, in.chunk_size, in.D, in.z, in.dt_bias,
                 in.dt_softplus, in.dt_min, in.dt_max, in.initial_states, in.seq_idx, in.cu_seqlens, in.discretization,
                 bwd.needs_grad);
}

// The public operator.
FwdResult ssd_chunk_scan(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B,
                         const at::Tensor& C, std::optional<c10::SymInt> chunk_size, const OptionalTensor& D,
                         const OptionalTensor& z, const OptionalTensor& dt_bias, bool dt_softplus,
                         std::optional<at::ArrayRef<double>> dt_limit, const OptionalTensor& initial_states,
                         const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, std::string_view discretization) {
  static const auto public_op = c10::Dispatcher::singleton().findSchemaOrThrow("ssm_kernels::ssd_chunk_scan", "");
  static const auto op = find_op<FwdSignature>("ssm_kernels::_ssd_chunk_scan");
  check_arguments(public_op, {x, dt, A, B, C, std::nullopt, D, z, dt_bias, std::nullopt, std::nullopt, initial_states, seq_idx,
                              cu_seqlens});
  const auto [dt_min, dt_max] = parse_dt_limit(kOp, dt_limit);
  return op.call(x, dt, A, B, C, std::move(chunk_size), D, z, dt_bias, dt_softplus, dt_min, dt_max, initial_states, seq_idx,
                 cu_seqlens, discretization);
}

FwdResult scan_no_grad(const Inputs& in) { return call(fwd_op(), in); }

// Saves the inputs and nothing else.
class SsdChunkScan : public torch::autograd::Function<SsdChunkScan> {
 public:
  // Backward calls a registered operator and nothing else, so compiled autograd may look inside.
  static constexpr bool is_traceable = true;

  // The tensors come as arguments of their own, too, where autograd looks for them: first those of Grad, in its order.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B,
                                                const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                                const OptionalTensor& dt_bias, const OptionalTensor& initial_states,
                                                const Inputs& in) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, final_states] = call(fwd_op(), in);
    ctx->save_for_backward({x, dt, A, B, C, or_undefined(D), or_undefined(z), or_undefined(dt_bias),
                            or_undefined(initial_states), or_undefined(in.seq_idx), or_undefined(in.cu_seqlens)});
    ctx->saved_data["chunk_size"] = in.chunk_size;
    ctx->saved_data["dt_softplus"] = in.dt_softplus;
    ctx->saved_data["dt_min"] = in.dt_min;
    ctx->saved_data["dt_max"] = in.dt_max;
    ctx->saved_data["discretization"] = std::string(in.discretization);
    ctx->set_materialize_grads(false);
    return {out, final_states};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    constexpr size_t kNumArguments = kNumGrads + 1;  // of forward, after ctx
    torch::autograd::variable_list result(kNumArguments);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const auto optional = [&](size_t i) { return or_absent(saved[i]); };
    const auto option = [&](const char* name) -> const c10::IValue& { return ctx->saved_data[name]; };
    BwdInputs bwd;
    bwd.grad_out = or_absent(grads[0]);
    bwd.grad_final_states = or_absent(grads[1]);
    bwd.in.x = saved[kGradX];
    bwd.in.dt = saved[kGradDt];
    bwd.in.A = saved[kGradA];
    bwd.in.B = saved[kGradB];
    bwd.in.C = saved[kGradC];
    bwd.in.chunk_size = option("chunk_size").toOptional<c10::SymInt>();
    bwd.in.D = optional(kGradD);
    bwd.in.z = optional(kGradZ);
    bwd.in.dt_bias = optional(kGradDtBias);
    bwd.in.dt_softplus = option("dt_softplus").toBool();
    bwd.in.dt_min = option("dt_min").toDouble();
    bwd.in.dt_max = option("dt_max").toDouble();
    bwd.in.initial_states = optional(kGradInitialStates);
    bwd.in.seq_idx = optional(kNumGrads);
    bwd.in.cu_seqlens = optional(kNumGrads + 1);
    bwd.in.discretization = option("discretization").toStringView();
    // Those that are absent have no edge of the graph.
    NeedsGrad& needs_grad = bwd.needs_grad;
    size_t edge = 0;
    for (size_t i = 0; i < kNumGrads; ++i) needs_grad[i] = saved[i].defined() && ctx->needs_input_grad(edge++);

    static const auto op = find_op<BwdSignature>("ssm_kernels::_ssd_chunk_scan_bwd");
    const GradTensors computed = std::apply([](const auto&... grad) { return GradTensors{grad...}; }, call(op, bwd));
    for (size_t i = 0; i < kNumGrads; ++i) {
      if (needs_grad[i]) result[i] = computed[i];
    }
    return result;
  }
};

FwdResult scan_autograd(const Inputs& in) {
  check_no_func_transform(kOp);
  if (!any_needs_autograd(in.x, in.dt, in.A, in.B, in.C, in.D, in.z, in.dt_bias, in.initial_states)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return scan_no_grad(in);
  }
  auto outputs = SsdChunkScan::apply(in.x, in.dt, in.A, in.B, in.C, in.D, in.z, in.dt_bias, in.initial_states, in);
  return {outputs[0], outputs[1]};
}

// Sequences in the autocast dtype; parameters and states in float32.
template <at::DeviceType device_type>
FwdResult scan_autocast(const Inputs& in) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const at::ScalarType lower = at::autocast::get_autocast_dtype(device_type);
  const auto sequence = [&](const auto& tensor) { return at::autocast::cached_cast(lower, tensor, device_type); };
  const auto parameter = [&](const auto& tensor) { return at::autocast::cached_cast(at::kFloat, tensor, device_type); };
  static const auto op = find_op<FwdSignature>("ssm_kernels::_ssd_chunk_scan");
  Inputs cast = in;
  cast.x = sequence(in.x);
  cast.dt = sequence(in.dt);
  cast.B = sequence(in.B);
  cast.C = sequence(in.C);
  cast.A = parameter(in.A);
  cast.D = parameter(in.D);
  cast.z = sequence(in.z);
  cast.dt_bias = parameter(in.dt_bias);
  cast.initial_states = parameter(in.initial_states);
  return call(op, cast);
}

}  // namespace

FwdResult forward(const Inputs& in) {
  if (in.x.is_meta()) return fwd_meta(in);
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.x.is_cuda()) return fwd_cuda(in);
#endif
  return fwd_aten(in);
}

BwdResult backward(const BwdInputs& bwd) {
  if (bwd.in.x.is_meta()) return bwd_meta(bwd);
#ifdef SSM_KERNELS_WITH_CUDA
  if (bwd.in.x.is_cuda()) return bwd_cuda(bwd);
#endif
  return bwd_aten(bwd);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { m.impl("ssd_chunk_scan", &ssd_chunk_scan); }

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("_ssd_chunk_scan", &Unpacked<FwdSignature>::kernel<&scan_no_grad>);
}

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_ssd_chunk_scan", &Unpacked<FwdSignature>::kernel<&scan_autograd>);
  // The adjoint is not differentiable again: say so rather than return wrong second derivatives.
  m.impl("_ssd_chunk_scan_fwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("_ssd_chunk_scan_bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  m.impl("_ssd_chunk_scan_fwd", &Unpacked<FwdSignature>::kernel<&fwd_meta>);
  m.impl("_ssd_chunk_scan_bwd", &Unpacked<BwdSignature>::kernel<&bwd_meta>);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  m.impl("_ssd_chunk_scan_fwd", &Unpacked<FwdSignature>::kernel<&fwd_aten>);
  m.impl("_ssd_chunk_scan_bwd", &Unpacked<BwdSignature>::kernel<&bwd_aten>);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
#ifdef SSM_KERNELS_WITH_CUDA
  m.impl("_ssd_chunk_scan_fwd", &Unpacked<FwdSignature>::kernel<&fwd_cuda>);
  m.impl("_ssd_chunk_scan_bwd", &Unpacked<BwdSignature>::kernel<&bwd_cuda>);
#else
  m.impl("_ssd_chunk_scan_fwd", torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
  m.impl("_ssd_chunk_scan_bwd", torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#endif
}

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) {
  m.impl("_ssd_chunk_scan", &Unpacked<FwdSignature>::kernel<&scan_autocast<at::kCPU>>);
}

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) {
  m.impl("_ssd_chunk_scan", &Unpacked<FwdSignature>::kernel<&scan_autocast<at::kCUDA>>);
}

}  // namespace ssm_kernels::ssd
