// The linear recurrences on every device: schemas, checks, allocation, Meta, Autograd and Autocast. One boxed function is the
// kernel of every public operator: it finds the recurrence in the table of common/recurrences.h and calls _linear_recurrence.

#include "linear_scan/linear_scan_op.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "linear_scan/linear_scan_adjoint.h"
#include "torch/allocation.h"
#include "torch/arguments.h"
#include "torch/autocast.h"
#include "torch/autograd_op.h"
#include "torch/batched_gradients.h"
#include "torch/checks.h"
#include "torch/choices.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::linear_scan {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The family of h_t = a_t h_{t-1} + b_t: linear_scan, linear_step and linear_scan_summary, mingru_scan, ..., a scan, a step
  // of it and its summary for each row of common/recurrences.h.
  for (const PublicOperator& op : public_operators()) {
    schemas.def(op.schema());
  }
  // Any of them, by name, a step with an axis of time of size 1; what does not matter to it is ignored.
  schemas.def(
      "_linear_recurrence(Tensor[] inputs, Tensor? h0, Tensor? cu_seqlens, Tensor? reset, str recurrence, "
      "str candidate_activation, bool gate_is_logit, bool reverse) -> (Tensor h, Tensor last_state)");
  schemas.kernels(
      "_linear_recurrence_fwd(Tensor[] inputs, Tensor? h0, Tensor? cu_seqlens, Tensor? reset, str recurrence, "
      "str candidate_activation, bool gate_is_logit, bool reverse) -> (Tensor h, Tensor last_state)");
  // Its adjoint. Gradients that are not needed have no elements; the last of needs_grad is of h0.
  schemas.kernels(
      "_linear_recurrence_bwd(Tensor? grad_h, Tensor? grad_last_state, Tensor[] inputs, Tensor h, Tensor? h0, "
      "Tensor? cu_seqlens, Tensor? reset, str recurrence, str candidate_activation, bool gate_is_logit, bool reverse, "
      "bool[5] needs_grad) -> (Tensor grad_0, Tensor grad_1, Tensor grad_2, Tensor grad_3, Tensor grad_h0)");

  for (const char* name : {"_linear_recurrence", "_linear_recurrence_bwd"}) {
    implement_boxed<&call_each_sample>(library, name, at::DispatchKey::Batched);
  }
}

namespace {

constexpr std::string_view kActivationNames[] = {"none", "g", "tanh"};
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
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  raise_unknown_choice(op, "candidate_activation", name, kActivationNames);
}

// Advice for inputs in the layout (batch, channels, seqlen), which the size of another argument's axis gives away.
std::string layout_remedy(const c10::SymInt& size, c10::SymIntArrayRef sequence, size_t axis) {
  const size_t other = 3 - axis;
  if (sequence.size() != 3 || size == 1 || size == sequence[axis] || size != sequence[other]) return "";
  return ", which fits inputs of shape (batch, channels, seqlen): pass their transpose(1, 2)";
}

// Raises if the second axis of the tensor, an axis of the sequence too, tells the layout (batch, channels, seqlen).
void check_second_axis(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& sequence, size_t axis) {
  if (tensor.dim() != 2 || tensor.sym_size(1) == sequence.sym_size(axis)) return;
  const std::string remedy = layout_remedy(tensor.sym_size(1), sequence.sym_sizes(), axis);
  TORCH_CHECK_VALUE(remedy.empty(), op, ": expected ", name,
                    axis == 1 ? " of shape (batch, seqlen)" : " of shape (batch, channels)", " beside inputs of shape ",
                    kSequenceAxes, " = ", sequence.sym_sizes(), ", got ", tensor.sym_sizes(), remedy);
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
  TORCH_CHECK_VALUE(fits, op, ": expected ", name, " of a shape that broadcasts to ", axes, " = ", target, ", got ", shape,
                    layout_remedy(shape.empty() ? c10::SymInt(1) : shape.back(), target, /*axis=*/2));
}

// Whether a gradient of a broadcasting input would be a sum of fp16 or bf16 numbers. Autocast casts the inputs later, so the
// dtypes of the input and `like` may still differ. requires_grad is not checked: under vmap it is false for every tensor.
bool sums_rounded_gradients(const at::Tensor& tensor, const at::Tensor& like) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (dtype == at::kHalf || dtype == at::kBFloat16) && at::GradMode::is_enabled() &&
         tensor.sym_sizes() != like.sym_sizes() && (dtype == like.scalar_type() || is_under_autocast(like));
}

// Expands a broadcasting input to the shape of the first input, one axis at a time: its gradient is then summed axis by axis,
// time first. (A sum over all axes at once has an order that depends on the number of threads.) The cast comes before the
// expansion, so that backward sums the gradient in the accumulation type and rounds it once.
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
  if (kind == Kind::kSummary) {
    schema.erase(schema.size() - 2);
  } else {
    schema += "Tensor? " + std::string(state_name()) + "=None";
  }
  std::string options;
  if (row->has_candidate_activation) options += ", str? candidate_activation=None";
  if (row->has_gate_is_logit) options += ", bool gate_is_logit=True";
  if (kind != Kind::kStep) options += ", bool reverse=False, Tensor? cu_seqlens=None, Tensor? reset=None";
  if (row->positional >= row->inputs && !options.empty()) schema += ", *";
  const char* const results = kind == Kind::kScan   ? "(Tensor h, Tensor last_state)"
                              : kind == Kind::kStep ? "(Tensor h, Tensor new_state)"
                                                    : "(Tensor last_state, Tensor decay)";
  return schema + options + ") -> " + results;
}

const std::vector<PublicOperator>& public_operators() {
  static const std::vector<PublicOperator> operators = [] {
    std::vector<PublicOperator> result;
    for (const RecurrenceRow& row : kRecurrenceTable) {
      const std::string scan = row.name;
      result.push_back({scan, &row, Kind::kScan});
      result.push_back({scan.substr(0, scan.rfind('_')) + "_step", &row, Kind::kStep});
      result.push_back({scan + "_summary", &row, Kind::kSummary});
    }
    return result;
  }();
  return operators;
}

c10::SymInt Inputs::sequences() const { return count_states(cu_seqlens, tensors[0].sym_size(0)); }

namespace {

void check_reset(const ArgumentChecks& checks, const Inputs& in) {
  if (!is_present(in.reset)) return;
  const at::Tensor& first = in.tensors[0];
  TORCH_CHECK_VALUE(!is_present(in.cu_seqlens), checks.op(),
                    ": expected reset or cu_seqlens, got both: let a sequence of cu_seqlens begin at each reset");
  check_second_axis(checks.op(), "reset", *in.reset, first, /*axis=*/1);
  checks.shape("reset", *in.reset, "(batch, seqlen)", {first.sym_size(0), first.sym_size(1)});
  TORCH_CHECK(in.reset->scalar_type() == at::kBool, checks.op(), ": expected reset of dtype bool, got ",
              dtype_name(in.reset->scalar_type()));
  checks.device("reset", *in.reset);
}

}  // namespace

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
    if (i < row.first_broadcast) {
      checks.tensor(name, input, kSequenceAxes, first.sym_sizes(), first.scalar_type());
    } else {
      checks.parameter(name, input, kSequenceAxes, first.sym_sizes());
    }
  }
  check_sequences(checks, /*seq_idx=*/std::nullopt, in.cu_seqlens, first.sym_size(0), first.sym_size(1));
  check_reset(checks, in);
  if (is_present(in.h0)) check_second_axis(op_name, op.state_name(), *in.h0, first, /*axis=*/2);
  checks.tensor(op.state_name(), in.h0, is_present(in.cu_seqlens) ? "(sequences, channels)" : kStateAxes,
                {in.sequences(), first.sym_size(2)}, checks.accumulate());
  return {op_name, &row, {parse_activation(op_name, in.candidate_activation), in.gate_is_logit}};
}

namespace {

at::TensorOptions state_options(const Inputs& in) {
  return in.tensors[0].options().dtype(accumulate_type(in.tensors[0].scalar_type()));
}

at::Tensor allocate_states(const Inputs& in, const OptionalTensor& empty) {
  const at::Tensor& first = in.tensors[0];
  return ssm_kernels::allocate_states(in.cu_seqlens, first.sym_size(1), {in.sequences(), first.sym_size(2)}, state_options(in),
                                      empty);
}

}  // namespace

FwdOutputs allocate_fwd(const Inputs& in) { return {empty_tensor_like(in.tensors[0]), allocate_states(in, in.h0)}; }

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const at::Tensor& first = in.tensors[0];
  const ArgumentChecks checks(find_operator(in.recurrence).name.c_str(), "h", first);
  checks.tensor("h", bwd.h, kSequenceAxes, first.sym_sizes(), first.scalar_type());
  checks.tensor("grad_h", bwd.grad_h, kSequenceAxes, first.sym_sizes(), first.scalar_type());
  checks.tensor("grad_last_state", bwd.grad_last_state, "(sequences, channels)", {in.sequences(), first.sym_size(2)},
                checks.accumulate());
  // A new tensor for each: results of an operator must not share memory.
  const auto none = [&] { return empty_tensor({0}, state_options(in)); };
  GradTensors grads;
  for (size_t i = 0; i < kMaxRecurrenceInputs; ++i) {
    grads[i] = i < in.tensors.size() && bwd.needs_grad[i] ? empty_tensor_like(in.tensors[i]) : none();
  }
  grads[kH0] = bwd.needs_grad[kH0] ? allocate_states(in, bwd.grad_last_state) : none();
  return grads;
}

SummaryOutputs allocate_summary(const SummaryInputs& in) {
  const std::array<c10::SymInt, 2> shape = {in.sequences(), in.tensors[0].sym_size(2)};
  const at::TensorOptions options = state_options(in);
  // Kernels write those of sequences that have steps, and of every row of a batch.
  if (is_present(in.cu_seqlens)) return {at::zeros_symint(shape, options), at::ones_symint(shape, options)};
  return {empty_tensor(shape, options), empty_tensor(shape, options)};
}

SummaryGrads allocate_summary_bwd(const SummaryBwdInputs& bwd) {
  const SummaryInputs& in = bwd.in;
  const at::Tensor& first = in.tensors[0];
  const ArgumentChecks checks(find_operator(in.recurrence).name.c_str(), "the first input", first);
  const std::array<c10::SymInt, 2> shape = {in.sequences(), first.sym_size(2)};
  checks.tensor("grad_last_state", bwd.grad_last_state, "(sequences, channels)", shape, checks.accumulate());
  checks.tensor("grad_decay", bwd.grad_decay, "(sequences, channels)", shape, checks.accumulate());
  SummaryGrads grads;
  for (size_t i = 0; i < grads.size(); ++i) {
    const bool is_needed = i < in.tensors.size() && bwd.needs_grad[i];
    grads[i] = is_needed ? empty_tensor_like(in.tensors[i]) : empty_tensor({0}, state_options(in));
  }
  return grads;
}

at::Tensor sequence_of_step(const Inputs& in) {
  if (!is_present(in.cu_seqlens)) return {};
  const int64_t seqlen = in.tensors[0].size(1);
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

ResetView reset_view(const Inputs& in) {
  if (!is_present(in.reset) || in.reset->size(1) == 0) return {};
  ResetView view{in.reset->const_data_ptr<bool>(), in.reset->stride(0), in.reset->stride(1)};
  if (in.reverse) {
    view.data += (in.reset->size(1) - 1) * view.stride_step;
    view.stride_step = -view.stride_step;
  }
  return view;
}

StateView state_view(const OptionalTensor& tensor, Access access) {
  if (!is_present(tensor) || tensor->dim() != 2) return {};
  return {data_of(*tensor, access), tensor->stride(0), tensor->stride(1)};
}

// Fills the parameters that all kernels share.
void fill_params(LinearScanParams& params, const Inputs& in, const Member& member, const at::Tensor& sequence_of_step) {
  const at::Tensor& first = in.tensors[0];
  params.batch = first.size(0);
  params.seqlen = first.size(1);
  params.channels = first.size(2);
  params.recurrence = member.row->recurrence;
  params.options = member.options;
  for (size_t i = 0; i < in.tensors.size(); ++i) params.inputs[i] = sequence_view(in, in.tensors[i], Access::kRead);
  if (sequence_of_step.defined()) params.sequence_of_step = sequence_of_step.const_data_ptr<int32_t>();
  params.reset = reset_view(in);
  params.initial_state = state_view(in.h0, Access::kRead);
}

}  // namespace

LinearScanFwdParams make_fwd_params(const Inputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                    const FwdOutputs& outputs) {
  LinearScanFwdParams params;
  fill_params(params, in, member, sequence_of_step);
  params.h = sequence_view(in, outputs.h, Access::kWrite);
  params.last_state = state_view(outputs.last_state, Access::kWrite);
  return params;
}

LinearScanSummaryParams make_summary_params(const SummaryInputs& in, const Member& member, const at::Tensor& sequence_of_step,
                                            const SummaryOutputs& outputs) {
  LinearScanSummaryParams params;
  fill_params(params, in, member, sequence_of_step);
  params.last_state = state_view(outputs.last_state, Access::kWrite);
  params.decay = state_view(outputs.decay, Access::kWrite);
  return params;
}

LinearScanBwdParams make_bwd_params(const BwdInputs& bwd, const Member& member, const at::Tensor& sequence_of_step,
                                    const GradTensors& grads) {
  const Inputs& in = bwd.in;
  LinearScanBwdParams params;
  fill_params(params, in, member, sequence_of_step);
  params.h = sequence_view(in, bwd.h, Access::kRead);
  params.grad_h = sequence_view(in, bwd.grad_h, Access::kRead);
  params.grad_last_state = state_view(bwd.grad_last_state, Access::kRead);
  for (size_t i = 0; i < in.tensors.size(); ++i) params.grad_inputs[i] = sequence_view(in, grads[i], Access::kWrite);
  params.grad_initial_state = state_view(grads[kH0], Access::kWrite);
  return params;
}

const Operator<FwdOutputs, Inputs>& recurrence_op() {
  static const Operator<FwdOutputs, Inputs> op("ssm_kernels::_linear_recurrence");
  return op;
}

namespace {

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
  SummaryInputs in;
  in.recurrence = op.name;
  if (op.kind != Kind::kSummary) in.h0 = (next++)->toOptional<at::Tensor>();
  in.candidate_activation = kActivationNames[0];
  if (row.has_candidate_activation) {
    if (!next->isNone()) in.candidate_activation = next->toStringView();
    ++next;
  }
  if (row.has_gate_is_logit) in.gate_is_logit = (next++)->toBool();
  if (op.kind != Kind::kStep) {
    in.reverse = (next++)->toBool();
    in.cu_seqlens = (next++)->toOptional<at::Tensor>();
    in.reset = next->toOptional<at::Tensor>();
  }

  if (op.kind == Kind::kStep) prepare_step(op, inputs, in.h0);
  const at::Tensor& first = inputs[0];
  ArgumentChecks(op.name.c_str(), row.input_names[0].data(), first).rank(row.input_names[0].data(), first, 3, kSequenceAxes);
  for (size_t i = row.first_broadcast; i < row.inputs; ++i) {
    check_broadcasts(op.name.c_str(), row.input_names[i].data(), inputs[i], kSequenceAxes, first.sym_sizes());
    inputs[i] = broadcast(inputs[i], first);
  }
  in.tensors = inputs;
  if (op.kind == Kind::kSummary) {
    static const Operator<SummaryOutputs, SummaryInputs> summary("ssm_kernels::_linear_recurrence_summary");
    auto [last_state, decay] = summary(in);
    return torch::jit::push(*stack, std::move(last_state), std::move(decay));
  }
  auto [h, last_state] = recurrence_op()(in);
  torch::jit::push(*stack, op.kind == Kind::kStep ? h.squeeze(1) : std::move(h), std::move(last_state));
}

// Sequences in the autocast dtype; inputs that broadcast (time constants, parameters) and states in float32.
void cast_inputs(Inputs& in, const Autocast& to) {
  const size_t first_broadcast = find_operator(in.recurrence).row->first_broadcast;
  in.cast = in.tensors.vec();
  for (size_t i = 0; i < in.cast.size(); ++i) i < first_broadcast ? to.to_lower(in.cast[i]) : to.to_float(in.cast[i]);
  to.to_float(in.h0);
  in.tensors = in.cast;
}

// Saves the inputs, h and h0.
struct LinearRecurrence : DifferentiableOp<LinearRecurrence, BwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_linear_recurrence", kForward[] = "ssm_kernels::_linear_recurrence_fwd";

  static const char* name(const Inputs& in) { return find_operator(in.recurrence).name.c_str(); }

  static auto differentiable(Inputs& in) { return std::tie(in.tensors, in.h0); }

  static Result forward(Inputs& in, variable_list* saved) {
    Result result = DifferentiableOp::forward(in, saved);
    if (saved != nullptr) saved->push_back(std::get<0>(result));
    return result;
  }

  static NeedsGrad has_edges(const Inputs& in) {
    NeedsGrad edges{};
    std::fill_n(edges.begin(), in.tensors.size(), true);
    edges[kH0] = is_present(in.h0);
    return edges;
  }

  static size_t argument_of(const Inputs& in, size_t grad) { return grad == kH0 ? in.tensors.size() : grad; }

  static GradTensors backward(const BwdInputs& bwd) {
    static const Operator<GradTensors, BwdInputs> op("ssm_kernels::_linear_recurrence_bwd");
    const bool is_differentiable =
        at::GradMode::is_enabled() && find_operator(bwd.in.recurrence).row->recurrence == Recurrence::kLinear;
    return is_differentiable ? differentiable_adjoint(bwd) : op(bwd);
  }

  static void cast(Inputs& in, const Autocast& to) { cast_inputs(in, to); }
};

// Saves the inputs and nothing else.
struct LinearRecurrenceSummary
    : DifferentiableOp<LinearRecurrenceSummary, SummaryBwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_linear_recurrence_summary";
  static constexpr char kForward[] = "ssm_kernels::_linear_recurrence_summary_fwd",
                        kBackward[] = "ssm_kernels::_linear_recurrence_summary_bwd";

  static const char* name(const Inputs& in) { return find_operator(in.recurrence).name.c_str(); }
  static auto differentiable(Inputs& in) { return std::tie(in.tensors); }

  static NeedsGrad has_edges(const Inputs& in) {
    NeedsGrad edges{};
    std::fill_n(edges.begin(), in.tensors.size(), true);
    return edges;
  }

  static void cast(Inputs& in, const Autocast& to) { cast_inputs(in, to); }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  for (const PublicOperator& op : public_operators()) {
    m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&public_operator>());
  }
}

SSM_DIFFERENTIABLE_OPERATOR(LinearRecurrence)
SSM_DIFFERENTIABLE_OPERATOR(LinearRecurrenceSummary)

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  register_kernels<&meta<check_inputs, allocate_fwd, Inputs>, &meta<check_inputs, allocate_bwd, BwdInputs>>(m);
  register_summary_kernels<&meta<check_inputs, allocate_summary, SummaryInputs>,
                           &meta<check_inputs, allocate_summary_bwd, SummaryBwdInputs>>(m);
}

}  // namespace ssm_kernels::linear_scan
