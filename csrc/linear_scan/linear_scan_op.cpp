// The dispatcher entries of the linear scan's family that are the same for every device: schemas, checks, allocation, Meta,
// Autograd, Autocast. Every member's public operator is one boxed function over _linear_recurrence, which the table in
// common/recurrences.h tells the members apart.

#include "linear_scan/linear_scan_op.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "linear_scan/linear_scan_adjoint.h"
#include "torch/arguments.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"
#include "torch/needs_autograd.h"
#include "torch/packed_sequences.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::linear_scan {
namespace {

constexpr const char* kActivationNames[] = {"none", "g", "tanh"};
constexpr char kSequenceAxes[] = "(batch, seqlen, channels)";
constexpr char kStateAxes[] = "(batch, channels)";
constexpr size_t kH0 = kMaxRecurrenceInputs;  // its place in NeedsGrad

const PublicOperator& find_operator(std::string_view name) {
  for (const PublicOperator& op : public_operators()) {
    if (op.name == name) return op;
  }
  TORCH_CHECK_VALUE(false, "unknown recurrence '", name, "'");
}

Activation parse_activation(const char* op, std::string_view name) {
  std::string known;
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
    known += (i > 0 ? ", " : "") + std::string(kActivationNames[i]);
  }
  TORCH_CHECK_VALUE(false, op, ": unknown candidate_activation '", name, "', expected one of: ", known);
}

// Raises unless the tensor broadcasts to the shape.
void check_broadcasts(const char* op, const char* name, const at::Tensor& tensor, const char* axes,
                      c10::SymIntArrayRef target) {
  const c10::SymIntArrayRef shape = tensor.sym_sizes();
  bool fits = shape.size() <= target.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    const c10::SymInt& size = shape[shape.size() - 1 - i];
    fits = size == 1 || size == target[target.size() - 1 - i];
  }
  TORCH_CHECK_VALUE(fits, op, ": expected ", name, " of a shape that broadcasts to ", axes, " = ", target, ", got ", shape);
}

bool is_under_autocast(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && at::autocast::is_autocast_enabled(tensor.device().type());
}

// Whether a gradient of a broadcasting input would be a sum of fp16 or bf16 numbers. Under autocast, which casts the inputs
// afterwards, the input may have another dtype than `like`. (Under vmap no tensor says that it requires a gradient.)
bool sums_rounded_gradients(const at::Tensor& tensor, const at::Tensor& like) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (dtype == at::kHalf || dtype == at::kBFloat16) && at::GradMode::is_enabled() &&
         tensor.sym_sizes() != like.sym_sizes() && (dtype == like.scalar_type() || is_under_autocast(like));
}

// A broadcasting input in the shape of the first. Expanded axis by axis, so that its gradient is summed likewise, time first:
// PyTorch's order in a sum to a single number depends on the number of threads. Cast before it is expanded, so that backward
// writes and sums the gradient in the accumulation type and rounds the sum once.
at::Tensor broadcast(const at::Tensor& tensor, const at::Tensor& like) {
  const c10::SymIntArrayRef shape = tensor.sym_sizes(), target = like.sym_sizes();
  std::vector<c10::SymInt> sizes(target.size(), 1);
  std::copy(shape.begin(), shape.end(), sizes.end() - static_cast<int64_t>(shape.size()));
  at::Tensor result = sums_rounded_gradients(tensor, like) ? tensor.to(at::kFloat) : tensor;
  for (const size_t axis : {0, 2, 1}) {
    if (sizes[axis] == target[axis]) continue;
    sizes[axis] = target[axis];
    result = result.expand_symint(sizes);
  }
  return result.sym_sizes().size() == target.size() ? result : result.expand_symint(target);
}

}  // namespace

std::string PublicOperator::schema() const {
  std::string schema = name + "(";
  for (size_t i = 0; i < row->inputs; ++i) {
    if (i == row->positional) schema += "*, ";
    schema += "Tensor " + std::string(row->input_names[i]) + ", ";
  }
  schema += "Tensor? " + std::string(state_name()) + "=None";
  std::string options;
  if (row->has_candidate_activation) options += ", str? candidate_activation=None";
  if (row->has_gate_is_logit) options += ", bool gate_is_logit=True";
  if (!is_step) options += ", bool reverse=False, Tensor? cu_seqlens=None";
  if (row->positional >= row->inputs && !options.empty()) schema += ", *";
  return schema + options + (is_step ? ") -> (Tensor h, Tensor new_state)" : ") -> (Tensor h, Tensor last_state)");
}

const std::vector<PublicOperator>& public_operators() {
  static const std::vector<PublicOperator> operators = [] {
    std::vector<PublicOperator> result;
    for (const RecurrenceRow& row : kRecurrenceTable) {
      const std::string scan = row.name;
      result.push_back({scan, &row, false});
      result.push_back({scan.substr(0, scan.rfind('_')) + "_step", &row, true});
    }
    return result;
  }();
  return operators;
}

c10::SymInt Inputs::sequences() const { return is_present(cu_seqlens) ? cu_seqlens->sym_size(0) - 1 : tensors[0].sym_size(0); }

Member check_inputs(const Inputs& in) {
  const PublicOperator& op = find_operator(in.recurrence);
  const RecurrenceRow& row = *op.row;
  const char* const op_name = op.name.c_str();
  TORCH_CHECK_VALUE(in.tensors.size() == row.inputs, op_name, ": expected ", row.inputs, " inputs, got ", in.tensors.size());
  const at::Tensor& first = in.tensors[0];
  const ArgumentChecks checks(op_name, row.input_names[0].data(), first);
  checks.rank(row.input_names[0].data(), first, 3, kSequenceAxes);
  for (size_t i = 1; i < row.inputs; ++i) {
    const at::Tensor& input = in.tensors[i];
    const char* const name = row.input_names[i].data();
    checks.shape(name, input, kSequenceAxes, first.sym_sizes());
    if (i < row.first_broadcast) {
      checks.dtype(name, input, first.scalar_type());
    } else {
      checks.dtype_or_accumulate(name, input);
    }
    checks.device(name, input);
  }
  if (is_present(in.cu_seqlens)) {
    check_cu_seqlens_argument(checks, op_name, *in.cu_seqlens, first.sym_size(0));
  }
  checks.tensor(op.state_name(), in.h0, is_present(in.cu_seqlens) ? "(sequences, channels)" : kStateAxes,
                {in.sequences(), first.sym_size(2)}, checks.accumulate());
  return {op_name, &row, {parse_activation(op_name, in.candidate_activation), in.gate_is_logit}};
}

namespace {

at::TensorOptions state_options(const Inputs& in) {
  return in.tensors[0].options().dtype(accumulate_type(in.tensors[0].scalar_type()));
}

// (sequences, channels). A kernel writes those of sequences with steps; those without are a copy of `empty`, absent: zero.
at::Tensor allocate_states(const Inputs& in, const OptionalTensor& empty) {
  const at::Tensor& first = in.tensors[0];
  const std::vector<c10::SymInt> shape = {in.sequences(), first.sym_size(2)};
  if (!is_present(in.cu_seqlens) && first.sym_size(1) != 0) return at::empty_symint(shape, state_options(in));
  if (!is_present(empty)) return at::zeros_symint(shape, state_options(in));
  return empty->clone(at::MemoryFormat::Contiguous);
}

}  // namespace

FwdOutputs allocate_fwd(const Inputs& in) { return {at::empty_like(in.tensors[0]), allocate_states(in, in.h0)}; }

GradTensors allocate_bwd(const Inputs& in, const at::Tensor& h, const OptionalTensor& grad_h,
                         const OptionalTensor& grad_last_state, const NeedsGrad& needs_grad) {
  const at::Tensor& first = in.tensors[0];
  const ArgumentChecks checks(find_operator(in.recurrence).name.c_str(), "h", first);
  checks.tensor("h", h, kSequenceAxes, first.sym_sizes(), first.scalar_type());
  checks.tensor("grad_h", grad_h, kSequenceAxes, first.sym_sizes(), first.scalar_type());
  checks.tensor("grad_last_state", grad_last_state, "(sequences, channels)", {in.sequences(), first.sym_size(2)},
                checks.accumulate());
  // Each its own: results of an operator must not share memory.
  const auto none = [&] { return at::empty({0}, state_options(in)); };
  GradTensors grads;
  for (size_t i = 0; i < in.tensors.size(); ++i) {
    grads.inputs.push_back(needs_grad[i] ? at::empty_like(in.tensors[i]) : none());
  }
  grads.h0 = needs_grad[kH0] ? allocate_states(in, grad_last_state) : none();
  return grads;
}

at::Tensor sequence_of_step(const Inputs& in) {
  if (!is_present(in.cu_seqlens)) return {};
  const int64_t seqlen = in.tensors[0].size(1);
  TORCH_CHECK_VALUE(seqlen == 0 || in.cu_seqlens->size(0) > 1, in.recurrence,
                    ": expected cu_seqlens to end at seqlen = ", seqlen, ", got no sequences");
  const at::TensorOptions options = in.cu_seqlens->options();
  const at::Tensor steps = in.reverse ? at::arange(seqlen - 1, -1, -1, options) : at::arange(seqlen, options);
  return sequence_at(*in.cu_seqlens, steps);
}

namespace {

SequenceView sequence_view(const Inputs& in, const OptionalTensor& tensor, Access access) {
  if (!is_present(tensor) || tensor->dim() != 3) return {};
  SequenceView view{data_of(*tensor, access), tensor->stride(0), tensor->stride(1), tensor->stride(2)};
  const at::ScalarType dtype = tensor->scalar_type();
  view.is_accumulate = dtype == accumulate_type(dtype);
  if (in.reverse && tensor->size(1) > 0) {
    view.data = static_cast<char*>(view.data) + (tensor->size(1) - 1) * view.stride_step * tensor->element_size();
    view.stride_step = -view.stride_step;
  }
  return view;
}

StateView state_view(const OptionalTensor& tensor, Access access) {
  if (!is_present(tensor) || tensor->dim() != 2) return {};
  return {data_of(*tensor, access), tensor->stride(0), tensor->stride(1)};
}

// The part that forward and backward share.
void fill_params(LinearScanParams& params, const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                 const at::Tensor& h, Access access_to_h) {
  params.batch = h.size(0);
  params.seqlen = h.size(1);
  params.channels = h.size(2);
  params.recurrence = member.row->recurrence;
  params.options = member.options;
  for (size_t i = 0; i < in.tensors.size(); ++i) params.inputs[i] = sequence_view(in, in.tensors[i], Access::kRead);
  params.h = sequence_view(in, h, access_to_h);
  if (sequence_of_step.defined()) params.sequence_of_step = sequence_of_step.const_data_ptr<int32_t>();
  params.initial_state = state_view(in.h0, Access::kRead);
}

}  // namespace

LinearScanFwdParams make_fwd_params(const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                    const FwdOutputs& outputs) {
  LinearScanFwdParams params;
  fill_params(params, in, member, sequence_of_step, outputs.h, Access::kWrite);
  params.last_state = state_view(outputs.last_state, Access::kWrite);
  return params;
}

LinearScanBwdParams make_bwd_params(const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                    const at::Tensor& h, const OptionalTensor& grad_h, const OptionalTensor& grad_last_state,
                                    const GradTensors& grads) {
  LinearScanBwdParams params;
  fill_params(params, in, member, sequence_of_step, h, Access::kRead);
  params.grad_h = sequence_view(in, grad_h, Access::kRead);
  params.grad_last_state = state_view(grad_last_state, Access::kRead);
  for (size_t i = 0; i < grads.inputs.size(); ++i) params.grad_inputs[i] = sequence_view(in, grads.inputs[i], Access::kWrite);
  params.grad_initial_state = state_view(grads.h0, Access::kWrite);
  return params;
}

namespace {

std::tuple<at::Tensor, at::Tensor> fwd_meta(at::TensorList inputs, const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                                            std::string_view recurrence, std::string_view candidate_activation,
                                            bool gate_is_logit, bool reverse) {
  const Inputs in{inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse};
  check_inputs(in);
  FwdOutputs outputs = allocate_fwd(in);
  return {outputs.h, outputs.last_state};
}

std::tuple<std::vector<at::Tensor>, at::Tensor> bwd_meta(const OptionalTensor& grad_h, const OptionalTensor& grad_last_state,
                                                         at::TensorList inputs, const at::Tensor& h, const OptionalTensor& h0,
                                                         const OptionalTensor& cu_seqlens, std::string_view recurrence,
                                                         std::string_view candidate_activation, bool gate_is_logit,
                                                         bool reverse, NeedsGrad needs_grad) {
  const Inputs in{inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse};
  check_inputs(in);
  GradTensors grads = allocate_bwd(in, h, grad_h, grad_last_state, needs_grad);
  return {std::move(grads.inputs), grads.h0};
}

const c10::TypedOperatorHandle<FwdSignature>& fwd_op() {
  static const auto op = find_op<FwdSignature>("ssm_kernels::_linear_recurrence_fwd");
  return op;
}

const c10::TypedOperatorHandle<FwdSignature>& recurrence_op() {
  static const auto op = find_op<FwdSignature>("ssm_kernels::_linear_recurrence");
  return op;
}

// Checks the shapes of a step's arguments, then gives its inputs an axis of time.
void prepare_step(const PublicOperator& op, std::vector<at::Tensor>& inputs, const OptionalTensor& state) {
  const RecurrenceRow& row = *op.row;
  const ArgumentChecks checks(op.name.c_str(), row.input_names[0].data(), inputs[0]);
  checks.rank(row.input_names[0].data(), inputs[0], 2, kStateAxes);
  const c10::SymDimVector shape(inputs[0].sym_sizes().begin(), inputs[0].sym_sizes().end());
  for (size_t i = 1; i < row.first_broadcast; ++i) checks.shape(row.input_names[i].data(), inputs[i], kStateAxes, shape);
  for (size_t i = row.first_broadcast; i < row.inputs; ++i) {
    check_broadcasts(op.name.c_str(), row.input_names[i].data(), inputs[i], kStateAxes, shape);
  }
  if (is_present(state)) checks.shape(op.state_name(), *state, kStateAxes, shape);
  for (at::Tensor& input : inputs) {
    if (input.dim() == 2) input = input.unsqueeze(1);
  }
}

// Every public operator of the family.
void public_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  check_arguments(handle, *stack);
  const std::string& name = handle.schema().name();
  const PublicOperator& op = find_operator(std::string_view(name).substr(name.find("::") + 2));
  const RecurrenceRow& row = *op.row;
  auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  auto next = arguments.begin();
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < row.inputs; ++i) inputs.push_back((next++)->toTensor());
  const OptionalTensor h0 = (next++)->toOptional<at::Tensor>();
  const auto activation = row.has_candidate_activation ? (next++)->toOptional<std::string>() : std::nullopt;
  const bool gate_is_logit = row.has_gate_is_logit ? (next++)->toBool() : true;
  const bool reverse = op.is_step ? false : (next++)->toBool();
  const OptionalTensor cu_seqlens = op.is_step ? std::nullopt : next->toOptional<at::Tensor>();

  if (op.is_step) prepare_step(op, inputs, h0);
  const at::Tensor& first = inputs[0];
  ArgumentChecks(op.name.c_str(), row.input_names[0].data(), first).rank(row.input_names[0].data(), first, 3, kSequenceAxes);
  for (size_t i = row.first_broadcast; i < row.inputs; ++i) {
    check_broadcasts(op.name.c_str(), row.input_names[i].data(), inputs[i], kSequenceAxes, first.sym_sizes());
    inputs[i] = broadcast(inputs[i], first);
  }
  auto [h, last_state] =
      recurrence_op().call(inputs, h0, cu_seqlens, op.name, activation.value_or(kActivationNames[0]), gate_is_logit, reverse);
  torch::jit::push(*stack, op.is_step ? h.squeeze(1) : std::move(h), std::move(last_state));
}

std::tuple<at::Tensor, at::Tensor> recurrence_no_grad(at::TensorList inputs, const OptionalTensor& h0,
                                                      const OptionalTensor& cu_seqlens, std::string_view recurrence,
                                                      std::string_view candidate_activation, bool gate_is_logit, bool reverse) {
  return fwd_op().call(inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse);
}

// Saves the inputs, h and h0.
class LinearRecurrence : public torch::autograd::Function<LinearRecurrence> {
 public:
  // Backward calls registered operators and nothing else, so compiled autograd may look inside.
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::TensorList& inputs,
                                                const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                                                const std::string& recurrence, const std::string& candidate_activation,
                                                bool gate_is_logit, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, last_state] = fwd_op().call(inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse);
    torch::autograd::variable_list saved = inputs.vec();
    saved.insert(saved.end(), {h, or_undefined(h0), or_undefined(cu_seqlens)});
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["recurrence"] = recurrence;
    ctx->saved_data["candidate_activation"] = candidate_activation;
    ctx->saved_data["gate_is_logit"] = gate_is_logit;
    ctx->saved_data["reverse"] = reverse;
    ctx->set_materialize_grads(false);
    return {h, last_state};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    constexpr size_t kNumOthers = 6;  // arguments of forward after ctx and the inputs
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    const size_t inputs = saved.size() - 3;
    torch::autograd::variable_list result(inputs + kNumOthers);
    if (!grads[0].defined() && !grads[1].defined()) return result;

    const OptionalTensor grad_h = or_absent(grads[0]), grad_last_state = or_absent(grads[1]);
    const OptionalTensor h0 = or_absent(saved[inputs + 1]), cu_seqlens = or_absent(saved[inputs + 2]);
    NeedsGrad needs_grad{};
    for (size_t i = 0; i < inputs; ++i) needs_grad[i] = ctx->needs_input_grad(i);
    needs_grad[kH0] = h0.has_value() && ctx->needs_input_grad(inputs);

    const at::TensorList tensors = at::TensorList(saved).slice(0, inputs);
    const std::string_view recurrence = ctx->saved_data["recurrence"].toStringView();
    const bool reverse = ctx->saved_data["reverse"].toBool();
    std::tuple<std::vector<at::Tensor>, at::Tensor> computed;
    if (at::GradMode::is_enabled() && find_operator(recurrence).row->recurrence == Recurrence::kLinear) {
      computed = differentiable_adjoint(grad_h, grad_last_state, tensors[0], saved[inputs], h0, cu_seqlens, reverse);
    } else {
      static const auto op = find_op<BwdSignature>("ssm_kernels::_linear_recurrence_bwd");
      computed = op.call(grad_h, grad_last_state, tensors, saved[inputs], h0, cu_seqlens, recurrence,
                         ctx->saved_data["candidate_activation"].toStringView(), ctx->saved_data["gate_is_logit"].toBool(),
                         reverse, needs_grad);
    }
    for (size_t i = 0; i < inputs; ++i) {
      if (needs_grad[i]) result[i] = std::get<0>(computed)[i];
    }
    if (needs_grad[kH0]) result[inputs] = std::get<1>(computed);
    return result;
  }
};

std::tuple<at::Tensor, at::Tensor> recurrence_autograd(at::TensorList inputs, const OptionalTensor& h0,
                                                       const OptionalTensor& cu_seqlens, std::string_view recurrence,
                                                       std::string_view candidate_activation, bool gate_is_logit,
                                                       bool reverse) {
  check_no_func_transform(find_operator(recurrence).name.c_str());
  const bool any_input = std::any_of(inputs.begin(), inputs.end(), [](const auto& input) { return needs_autograd(input); });
  if (!any_input && !needs_autograd(h0)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return recurrence_no_grad(inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse);
  }
  auto outputs = LinearRecurrence::apply(inputs, h0, cu_seqlens, std::string(recurrence), std::string(candidate_activation),
                                         gate_is_logit, reverse);
  return {outputs[0], outputs[1]};
}

// Sequences in the autocast dtype; what broadcasts (time constants, parameters) and states in float32.
template <at::DeviceType device_type>
std::tuple<at::Tensor, at::Tensor> recurrence_autocast(at::TensorList inputs, const OptionalTensor& h0,
                                                       const OptionalTensor& cu_seqlens, std::string_view recurrence,
                                                       std::string_view candidate_activation, bool gate_is_logit,
                                                       bool reverse) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const at::ScalarType lower = at::autocast::get_autocast_dtype(device_type);
  const size_t first_broadcast = find_operator(recurrence).row->first_broadcast;
  std::vector<at::Tensor> cast;
  for (size_t i = 0; i < inputs.size(); ++i) {
    cast.push_back(at::autocast::cached_cast(i < first_broadcast ? lower : at::kFloat, inputs[i], device_type));
  }
  return recurrence_op().call(cast, at::autocast::cached_cast(at::kFloat, h0, device_type), cu_seqlens, recurrence,
                              candidate_activation, gate_is_logit, reverse);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  for (const PublicOperator& op : public_operators()) {
    m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&public_operator>());
  }
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("_linear_recurrence", &recurrence_no_grad); }

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_linear_recurrence", &recurrence_autograd);
  m.impl("_linear_recurrence_fwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("_linear_recurrence_bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  m.impl("_linear_recurrence_fwd", &fwd_meta);
  m.impl("_linear_recurrence_bwd", &bwd_meta);
}

#ifndef SSM_KERNELS_WITH_CUDA
TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  m.impl("_linear_recurrence_fwd", torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
  m.impl("_linear_recurrence_bwd", torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
}
#endif

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) { m.impl("_linear_recurrence", &recurrence_autocast<at::kCPU>); }

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) { m.impl("_linear_recurrence", &recurrence_autocast<at::kCUDA>); }

}  // namespace ssm_kernels::linear_scan
