// The parts of causal_conv1d and causal_conv1d_update that are the same for every device: checks, allocation, Meta, Autograd
// and Autocast.

#include "causal_conv1d/causal_conv1d_op.h"

#include <ATen/ops/arange.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/choices.h"
#include "torch/memory_overlap.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::causal_conv1d {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // Depthwise convolution over the last `width` steps: act(bias + sum_l weight[:, width - 1 - l] x_{t-l}).
  schemas.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, Tensor? initial_state=None) -> (Tensor out, Tensor final_state)");
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone.
  const std::string convolution_arguments =
      "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_state, "
      "str? activation) -> (Tensor out, Tensor final_state)";
  schemas.def("_causal_conv1d" + convolution_arguments);
  schemas.kernels("_causal_conv1d_fwd" + convolution_arguments);
  // Its adjoint. Gradients that are absent or not needed have no elements; the last of needs_grad is of initial_state. The
  // second form writes the first gradient where it is told to: into columns of a wider tensor, for instance.
  schemas.kernels(
      "_causal_conv1d_bwd(Tensor? grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, "
      "Tensor? cu_seqlens, Tensor? initial_state, str? activation, bool[4] needs_grad, str layer='causal_conv1d') "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_initial_state)");
  schemas.kernels(
      "_causal_conv1d_bwd_out(Tensor? grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_state, str? activation, bool[4] needs_grad, Tensor(a!) grad_x, "
      "Tensor? grad_out_2=None) -> (Tensor grad_weight, Tensor grad_bias, Tensor grad_initial_state)");
  // A step of it or a few, the state rolled in place.
  schemas.in_place(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, str? activation=None, "
      "Tensor? state_batch_indices=None) -> Tensor");
  // The same for servers: into `out`, packed tokens, slots to read from and slots to write to.
  schemas.in_place(
      "causal_conv1d_update_out(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, "
      "Tensor? state_batch_indices, Tensor(b!) out, Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, "
      "Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None, Tensor(c!)? intermediate_conv_window=None, "
      "Tensor? intermediate_state_indices=None, bool disable_state_update=False) -> ()");
}

namespace {

constexpr char kOp[] = "causal_conv1d", kUpdateOp[] = "causal_conv1d_update";
constexpr char kSequence[] = "(batch, seqlen, channels)";
constexpr BufferNames kWindows{"intermediate_conv_window", "(entries, seqlen, channels, width - 1)"};

bool has_silu(const char* op, OptionalName activation) {
  if (!activation.has_value() || *activation == "none") return false;
  TORCH_CHECK_VALUE(*activation == "silu" || *activation == "swish", op, ": unknown activation '", *activation,
                    "', expected None, 'silu' or 'swish'", nearest_choice(*activation, {"silu", "swish", "none"}));
  return true;
}

void check_parameters(const ArgumentChecks& checks, const at::Tensor& weight, const OptionalTensor& bias,
                      const c10::SymInt& channels) {
  checks.rank("weight", weight, 2, "(channels, width)");
  const c10::SymInt width = weight.sym_size(1);
  TORCH_CHECK_VALUE(width >= 1, checks.op(), ": expected weight of a width of at least 1, got ", weight.sym_sizes());
  checks.parameter("weight", weight, "(channels, width)", {channels, width});
  checks.parameter("bias", bias, "(channels,)", {channels});
}

// Names the layout of a sequence whose second axis, not the last, has as many entries as the weight.
void check_layout(const char* op, const at::Tensor& x, const at::Tensor& weight) {
  if (x.dim() != 3 || weight.dim() != 2) return;
  const c10::SymInt channels = weight.sym_size(0);
  TORCH_CHECK_VALUE(x.sym_size(2) == channels || x.sym_size(1) != channels, op, ": expected x of shape ", kSequence,
                    " with channels = ", channels, ", the rows of weight, got (batch, channels, seqlen) = ", x.sym_sizes(),
                    ": pass x.transpose(1, 2)");
}

const char* state_axes(const Inputs& in) {
  return is_present(in.cu_seqlens) ? "(sequences, channels, width - 1)" : "(batch, channels, width - 1)";
}

c10::SymDimVector state_shape(const Inputs& in) {
  return {count_states(in.cu_seqlens, in.x.sym_size(0)), in.x.sym_size(2), in.weight.sym_size(1) - 1};
}

at::Tensor allocate_states(const Inputs& in, const OptionalTensor& empty) {
  return ssm_kernels::allocate_states(in.cu_seqlens, in.x.sym_size(1), state_shape(in), in.x.options(), empty);
}

}  // namespace

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "x", in.x);
  checks.rank("x", in.x, 3, kSequence);
  check_layout(kOp, in.x, in.weight);
  check_parameters(checks, in.weight, in.bias, in.x.sym_size(2));
  check_sequences(checks, in.seq_idx, in.cu_seqlens, in.x.sym_size(0), in.x.sym_size(1));
  checks.tensor("initial_state", in.initial_state, state_axes(in), state_shape(in), in.x.scalar_type());
  has_silu(kOp, in.activation);
}

FwdOutputs allocate_fwd(const Inputs& in) { return {empty_tensor_like(in.x), allocate_states(in, in.initial_state)}; }

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const ArgumentChecks checks("causal_conv1d backward", "x", in.x);
  const at::ScalarType dtype = in.x.scalar_type();
  checks.tensor("grad_out", bwd.grad_out, kSequence, in.x.sym_sizes(), dtype);
  checks.tensor("grad_out_2", bwd.grad_out_2, kSequence, in.x.sym_sizes(), dtype);
  TORCH_CHECK_VALUE(is_present(bwd.grad_out) || !is_present(bwd.grad_out_2),
                    "causal_conv1d backward: expected grad_out with grad_out_2, got None");
  checks.tensor("grad_final_state", bwd.grad_final_state, state_axes(in), state_shape(in), dtype);
  checks.tensor("grad_x", bwd.grad_x, kSequence, in.x.sym_sizes(), dtype);
  const auto none = [&] { return empty_tensor({0}, in.x.options()); };
  const auto parameter = [&](Grad grad, const at::Tensor& tensor) {
    return bwd.needs_grad[grad] ? empty_contiguous_like(tensor) : none();
  };
  GradTensors grads;
  grads[kGradX] = is_present(bwd.grad_x) ? *bwd.grad_x : bwd.needs_grad[kGradX] ? empty_tensor_like(in.x) : none();
  grads[kGradWeight] = parameter(kGradWeight, in.weight);
  grads[kGradBias] = is_present(in.bias) ? parameter(kGradBias, *in.bias) : none();
  const bool needs_state = bwd.needs_grad[kGradInitialState] && is_present(in.initial_state);
  grads[kGradInitialState] = needs_state ? allocate_states(in, bwd.grad_final_state) : none();
  return grads;
}

OptionalTensor grad_out_like_x(const OptionalTensor& grad_out, const at::Tensor& x) {
  if (!is_present(grad_out)) return std::nullopt;
  const at::Tensor& grad = *grad_out;
  if (x.stride(2) == 1) return grad.stride(2) == 1 ? grad : grad.contiguous();
  if (x.stride(1) != 1 || grad.stride(1) == 1) return grad;
  return grad.transpose(1, 2).contiguous().transpose(1, 2);
}

at::Tensor sequence_ids(const Inputs& in) {
  if (!is_present(in.cu_seqlens)) return is_present(in.seq_idx) ? *in.seq_idx : at::Tensor();
  const int64_t seqlen = in.x.size(1);
  const at::Tensor packed = sequence_at(*in.cu_seqlens, at::arange(seqlen, in.cu_seqlens->options())).unsqueeze(0);
  if (!is_present(in.seq_idx) || seqlen == 0) return packed;
  const at::Tensor part = sequence_starts(*in.seq_idx).logical_or_(sequence_starts(packed)).cumsum(1);
  // Whether a step belongs to another part than its sequence's first or last step.
  const auto is_not_part_of = [&](const at::Tensor& steps) {
    return part.ne(part.gather(1, steps.clamp(0, seqlen - 1).index_select(0, packed.flatten()).unsqueeze(0)));
  };
  const at::Tensor cu_seqlens = in.cu_seqlens->to(at::kLong);
  const at::Tensor first = cu_seqlens.slice(0, 0, -1), last = cu_seqlens.slice(0, 1).sub(1);
  return packed.to(at::kLong)
      .add_(part.remainder(2), kOddPart)
      .add_(is_not_part_of(first), kNoInitialState)
      .add_(is_not_part_of(last), kNoFinalState)
      .add_(in.seq_idx->lt(0), kPadding);
}

namespace {

// A SequenceView or a StateView; empty without the tensor, for a gradient that is not needed and for a state of no steps.
template <typename View>
View view_of(const OptionalTensor& tensor, Access access) {
  if (!is_present(tensor) || tensor->dim() != 3 || tensor->size(2) == 0) return {};
  return {data_of(*tensor, access), tensor->stride(0), tensor->stride(1), tensor->stride(2)};
}

ParameterView parameter_view(const OptionalTensor& tensor, at::ScalarType dtype) {
  if (!is_present(tensor)) return {};
  return {tensor->const_data_ptr(), tensor->stride(0), tensor->dim() == 2 ? tensor->stride(1) : 0,
          tensor->scalar_type() == dtype};
}

// Fills in the params that all operators share, but for the view of x, which may have no axis of time.
template <typename Params, typename AnyInputs>
void fill_shared_params(Params& params, const AnyInputs& in) {
  params.batch = in.x.size(0);
  params.seqlen = in.x.dim() == 3 ? in.x.size(1) : 1;
  params.channels = in.x.size(-1);
  params.width = in.weight.size(1);
  params.has_silu = has_silu(kOp, in.activation);
  params.kind = scalar_kind(in.x.scalar_type());
  params.weight = parameter_view(in.weight, in.x.scalar_type());
  params.bias = parameter_view(in.bias, in.x.scalar_type());
}

void fill_params(ConvParams& params, const Inputs& in, const at::Tensor& ids) {
  fill_shared_params(params, in);
  params.has_state_of_each_sequence = is_present(in.cu_seqlens);
  params.x = view_of<SequenceView>(in.x, Access::kRead);
  params.initial_state = view_of<StateView>(in.initial_state, Access::kRead);
  if (ids.defined()) params.ids = {ids.const_data_ptr(), ids.scalar_type() == at::kLong, ids.stride(0), ids.stride(1)};
}

}  // namespace

ConvFwdParams make_fwd_params(const Inputs& in, const at::Tensor& ids, const FwdOutputs& outputs) {
  ConvFwdParams params;
  fill_params(params, in, ids);
  params.out = view_of<SequenceView>(outputs.out, Access::kWrite);
  params.final_state = view_of<StateView>(outputs.final_state, Access::kWrite);
  return params;
}

ConvBwdParams make_bwd_params(const BwdInputs& bwd, const OptionalTensor& grad_out, const OptionalTensor& grad_out_2,
                              const at::Tensor& ids, const GradTensors& grads) {
  ConvBwdParams params;
  fill_params(params, bwd.in, ids);
  params.grad_out = view_of<SequenceView>(grad_out, Access::kRead);
  params.grad_out_2 = view_of<SequenceView>(grad_out_2, Access::kRead);
  params.grad_final_state = view_of<StateView>(bwd.grad_final_state, Access::kRead);
  params.grad_x = view_of<SequenceView>(grads[kGradX], Access::kWrite);
  params.grad_initial_state = view_of<StateView>(grads[kGradInitialState], Access::kWrite);
  if (bwd.needs_grad[kGradWeight]) params.grad_weight = grads[kGradWeight].mutable_data_ptr();
  if (bwd.needs_grad[kGradBias] && is_present(bwd.in.bias)) params.grad_bias = grads[kGradBias].mutable_data_ptr();
  return params;
}

namespace {

// The checks of all arguments but those that choose slots. `rows`: the number of states without them.
void check_steps(const ArgumentChecks& checks, const UpdateInputs& in, const c10::SymInt& rows, const char* state_axes) {
  const c10::SymInt channels = in.x.sym_size(-1);
  check_layout(kUpdateOp, in.x, in.weight);
  check_parameters(checks, in.weight, in.bias, channels);
  checks.rank("conv_state", in.conv_state, 3, state_axes);
  const c10::SymInt length = in.conv_state.sym_size(2);
  const bool has_indices = is_present(in.state_batch_indices);
  checks.parameter("conv_state", in.conv_state, state_axes, {has_indices ? in.conv_state.sym_size(0) : rows, channels, length});
  TORCH_CHECK_VALUE(length >= in.weight.sym_size(1) - 1, kUpdateOp,
                    ": expected conv_state of at least width - 1 = ", in.weight.sym_size(1) - 1, " steps, got ",
                    in.conv_state.sym_sizes());
  has_silu(kUpdateOp, in.activation);
}

}  // namespace

void check_inputs(const UpdateInputs& in) {
  check_defined(kUpdateOp, "conv_state", in.conv_state);
  const ArgumentChecks checks(kUpdateOp, "x", in.x);
  TORCH_CHECK_VALUE(in.x.dim() == 2 || in.x.dim() == 3, kUpdateOp,
                    ": expected x of shape (batch, channels) or (batch, seqlen, channels), got ", in.x.sym_sizes());
  const c10::SymInt batch = in.x.sym_size(0);
  check_steps(checks, in, batch, "(batch, channels, length)");
  checks.indices("state_batch_indices", in.state_batch_indices, "(batch,)", {batch});
}

void check_out_inputs(const UpdateOutInputs& in) {
  check_defined(kUpdateOp, "conv_state", in.conv_state);
  const ArgumentChecks checks(kUpdateOp, "x", in.x);
  const bool is_packed = in.is_packed();
  TORCH_CHECK_VALUE(is_packed || in.x.dim() == 2 || in.x.dim() == 3, kUpdateOp,
                    ": expected x of shape (batch, channels) or (batch, seqlen, channels), got ", in.x.sym_sizes());
  const c10::SymInt rows = count_rows(checks, in.cu_seqlens, in.x);
  if (is_packed) checks.rank("x", in.x, 2, "(tokens, channels)");
  check_steps(checks, in, rows, is_packed ? "(sequences, channels, length)" : "(batch, channels, length)");
  std::optional<c10::SymInt> tokens;
  if (!is_packed) tokens = in.x.dim() == 3 ? in.x.sym_size(1) : c10::SymInt(1);
  const DecodingOptions options = in.decoding();
  check_decoding_options(checks, options, rows, tokens, /*has_columns=*/false);
  const char* const axes = is_packed ? "(tokens, channels)" : in.x.dim() == 2 ? "(batch, channels)" : kSequence;
  checks.tensor("out", in.out, axes, in.x.sym_sizes(), in.x.scalar_type());
  const c10::SymInt past = in.weight.sym_size(1) - 1, length = in.conv_state.sym_size(2);
  TORCH_CHECK_VALUE(!is_present(in.num_accepted_tokens) || is_packed || length >= past - 1 + *tokens, kUpdateOp,
                    ": expected conv_state of at least width - 2 + seqlen = ", past - 1 + *tokens,
                    " steps with num_accepted_tokens, got ", in.conv_state.sym_sizes());
  check_intermediate(checks, kWindows, options, {in.x.sym_size(-1), past}, in.conv_state.scalar_type(), rows, tokens);
}

at::Tensor allocate_out(const UpdateInputs& in) { return empty_tensor(in.x.sym_sizes(), in.x.options()); }

namespace {

// All but the slots of the rows.
ConvUpdateParams make_step_params(const UpdateInputs& in, const at::Tensor& out, bool is_packed) {
  const auto view = [&](const at::Tensor& tensor, Access access) {
    if (is_packed) return SequenceView{data_of(tensor, access), 0, tensor.stride(0), tensor.stride(1)};
    return SequenceView{data_of(tensor, access), tensor.stride(0), tensor.dim() == 3 ? tensor.stride(1) : 0, tensor.stride(-1)};
  };
  ConvUpdateParams params;
  fill_shared_params(params, in);
  params.slots = in.conv_state.size(0);
  params.state_length = in.conv_state.size(2);
  params.state_is_input_kind = in.conv_state.scalar_type() == in.x.scalar_type();
  params.x = view(in.x, Access::kRead);
  params.out = view(out, Access::kWrite);
  params.state = {in.conv_state.mutable_data_ptr(), in.conv_state.stride(0), in.conv_state.stride(1), in.conv_state.stride(2)};
  return params;
}

void set_slots(ConvUpdateParams& params, const OptionalTensor& slots) {
  if (is_present(slots)) {
    params.slots_of_batch = {slots->const_data_ptr(), slots->scalar_type() == at::kLong, slots->stride(0), 0};
  }
}

// The arguments that a step reads.
std::array<NamedTensor, 4> read_arguments(const UpdateInputs& in) {
  return {NamedTensor("x", in.x), {"weight", in.weight}, {"bias", in.bias}, {"state_batch_indices", in.state_batch_indices}};
}

}  // namespace

ConvUpdateParams make_params(const UpdateInputs& in, const at::Tensor& out) {
  check_in_place(kUpdateOp, "conv_state", in.conv_state, read_arguments(in));
  ConvUpdateParams params = make_step_params(in, out, /*is_packed=*/false);
  set_slots(params, in.state_batch_indices);
  return params;
}

ConvUpdateParams make_out_params(const UpdateOutInputs& in, ConvTokenParams& tokens) {
  const DecodingOptions options = in.decoding();
  check_writes(kUpdateOp, {{"conv_state", in.conv_state}, {"out", in.out}, {kWindows.name, in.intermediate}},
               read_arguments(in), options);
  const bool is_packed = in.is_packed();
  ConvUpdateParams params = make_step_params(in, in.out, is_packed);
  const int64_t all_tokens = is_packed ? in.x.size(0) : params.seqlen;
  if (is_packed) params.batch = in.cu_seqlens->size(0) - 1;
  if (in.is_plain()) set_slots(params, in.state_batch_indices);
  tokens.rows = make_decoding_rows(options, params.batch, all_tokens);
  if (is_present(in.intermediate)) {
    const at::Tensor& windows = *in.intermediate;
    tokens.windows = {windows.mutable_data_ptr(), windows.stride(0), windows.stride(2), windows.stride(3)};
    tokens.windows_token = windows.stride(1);
  }
  return params;
}

namespace {

// The node saves the inputs only.
struct CausalConv1d : DifferentiableOp<CausalConv1d, BwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_causal_conv1d";
  static constexpr char kForward[] = "ssm_kernels::_causal_conv1d_fwd", kBackward[] = "ssm_kernels::_causal_conv1d_bwd";

  static const char* name(const Inputs&) { return kOp; }

  static auto differentiable(Inputs& in) { return std::tie(in.x, in.weight, in.bias, in.initial_state); }

  // Sequences and states in the autocast dtype; parameters of a third dtype in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.initial_state);
    to.to_float_unless(to.lower, in.weight, in.bias);
  }
};

// The public operator's arguments.
struct PublicInputs : Inputs {
  auto fields() { return std::tie(x, weight, bias, activation, seq_idx, cu_seqlens, initial_state); }
};

CausalConv1d::Result causal_conv1d(const PublicInputs& in) {
  static const Operator<CausalConv1d::Result, PublicInputs> op("ssm_kernels::causal_conv1d");
  op.check(in);
  return operator_of<CausalConv1d>()(in);
}

struct CausalConv1dUpdate : InPlaceOp<UpdateInputs> {
  static constexpr char kSchema[] = "ssm_kernels::causal_conv1d_update";
  static constexpr const char *kName = kUpdateOp, *kScan = kOp;

  static auto tensors(const UpdateInputs& in) { return std::tie(in.conv_state, in.x, in.weight, in.bias); }

  static void count_writes(const UpdateInputs& in) { torch::autograd::increment_version(in.conv_state); }

  // The state is written to and is not cast: it has the dtype of the cast x, or is float32.
  static void cast(UpdateInputs& in, const Autocast& to) {
    to.to_lower(in.x);
    to.to_float(in.weight, in.bias);
  }

  static at::Tensor meta(const UpdateInputs& in) {
    check_inputs(in);
    return allocate_out(in);
  }
};

struct CausalConv1dUpdateOut : ServerOp<CausalConv1dUpdate> {
  static constexpr char kSchema[] = "ssm_kernels::causal_conv1d_update_out";

  static NoResult meta(const UpdateOutInputs& in) {
    check_out_inputs(in);
    return {};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { implement<&causal_conv1d>(m, "causal_conv1d"); }

SSM_DIFFERENTIABLE_OPERATOR(CausalConv1d)

SSM_IN_PLACE_OPERATOR(CausalConv1dUpdate)
SSM_IN_PLACE_OPERATOR(CausalConv1dUpdateOut)

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  constexpr void (*kCheck)(const Inputs&) = &check_inputs;
  register_convolution<&meta<kCheck, allocate_fwd, Inputs>, &meta<kCheck, allocate_bwd, BwdInputs>>(m);
}

}  // namespace ssm_kernels::causal_conv1d
