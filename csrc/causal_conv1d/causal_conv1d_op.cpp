// The parts of causal_conv1d and causal_conv1d_update that are the same for every device: checks, allocation, Meta, Autograd
// and Autocast.

#include "causal_conv1d/causal_conv1d_op.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/memory_overlap.h"
#include "torch/packed_sequences.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::causal_conv1d {
namespace {

constexpr char kOp[] = "causal_conv1d", kUpdateOp[] = "causal_conv1d_update";
constexpr char kSequence[] = "(batch, seqlen, channels)";

bool has_silu(const char* op, OptionalName activation) {
  if (!activation.has_value() || *activation == "none") return false;
  TORCH_CHECK_VALUE(*activation == "silu" || *activation == "swish", op, ": unknown activation '", *activation,
                    "', expected None, 'silu' or 'swish'");
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
  check_parameters(checks, in.weight, in.bias, in.x.sym_size(2));
  check_sequences(checks, in.seq_idx, in.cu_seqlens, in.x.sym_size(0), in.x.sym_size(1));
  checks.tensor("initial_state", in.initial_state, state_axes(in), state_shape(in), in.x.scalar_type());
  has_silu(kOp, in.activation);
}

FwdOutputs allocate_fwd(const Inputs& in) { return {at::empty_like(in.x), allocate_states(in, in.initial_state)}; }

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
  const auto none = [&] { return at::empty({0}, in.x.options()); };
  const auto parameter = [&](Grad grad, const at::Tensor& tensor) {
    return bwd.needs_grad[grad] ? at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous) : none();
  };
  GradTensors grads;
  grads[kGradX] = is_present(bwd.grad_x) ? *bwd.grad_x : bwd.needs_grad[kGradX] ? at::empty_like(in.x) : none();
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
  if (is_present(in.seq_idx)) return *in.seq_idx;
  if (!is_present(in.cu_seqlens)) return {};
  return sequence_at(*in.cu_seqlens, at::arange(in.x.size(1), in.cu_seqlens->options()));
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
  if (ids.defined()) {
    const bool has_rows = ids.dim() == 2;
    params.ids = {ids.const_data_ptr(), ids.scalar_type() == at::kLong, has_rows ? ids.stride(0) : 0,
                  ids.stride(has_rows ? 1 : 0)};
  }
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

void check_update_inputs(const UpdateInputs& in) {
  check_defined(kUpdateOp, "conv_state", in.conv_state);
  const ArgumentChecks checks(kUpdateOp, "x", in.x);
  TORCH_CHECK_VALUE(in.x.dim() == 2 || in.x.dim() == 3, kUpdateOp,
                    ": expected x of shape (batch, channels) or (batch, seqlen, channels), got ", in.x.sym_sizes());
  const c10::SymInt batch = in.x.sym_size(0), channels = in.x.sym_size(-1);
  check_parameters(checks, in.weight, in.bias, channels);
  checks.rank("conv_state", in.conv_state, 3, "(batch, channels, length)");
  const c10::SymInt length = in.conv_state.sym_size(2);
  const bool has_indices = is_present(in.state_batch_indices);
  checks.parameter("conv_state", in.conv_state, "(batch, channels, length)",
                   {has_indices ? in.conv_state.sym_size(0) : batch, channels, length});
  TORCH_CHECK_VALUE(length >= in.weight.sym_size(1) - 1, kUpdateOp,
                    ": expected conv_state of at least width - 1 = ", in.weight.sym_size(1) - 1, " steps, got ",
                    in.conv_state.sym_sizes());
  checks.indices("state_batch_indices", in.state_batch_indices, "(batch,)", {batch});
  has_silu(kUpdateOp, in.activation);
}

at::Tensor allocate_update(const UpdateInputs& in) { return at::empty_symint(in.x.sym_sizes(), in.x.options()); }

ConvUpdateParams make_update_params(const UpdateInputs& in, const at::Tensor& out) {
  check_in_place(kUpdateOp, "conv_state", in.conv_state,
                 {{"x", in.x}, {"weight", in.weight}, {"bias", in.bias}, {"state_batch_indices", in.state_batch_indices}});
  const bool has_steps = in.x.dim() == 3;
  const auto view = [&](const at::Tensor& tensor, Access access) {
    return SequenceView{data_of(tensor, access), tensor.stride(0), has_steps ? tensor.stride(1) : 0, tensor.stride(-1)};
  };
  ConvUpdateParams params;
  fill_shared_params(params, in);
  params.slots = in.conv_state.size(0);
  params.state_length = in.conv_state.size(2);
  params.state_is_input_kind = in.conv_state.scalar_type() == in.x.scalar_type();
  params.x = view(in.x, Access::kRead);
  params.out = view(out, Access::kWrite);
  params.state = {in.conv_state.mutable_data_ptr(), in.conv_state.stride(0), in.conv_state.stride(1), in.conv_state.stride(2)};
  if (is_present(in.state_batch_indices)) {
    const at::Tensor& indices = *in.state_batch_indices;
    params.slots_of_batch = {indices.const_data_ptr(), indices.scalar_type() == at::kLong, indices.stride(0), 0};
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

  static const at::Tensor& written(const UpdateInputs& in) { return in.conv_state; }

  // The state is written to and is not cast: it has the dtype of the cast x, or is float32.
  static void cast(UpdateInputs& in, const Autocast& to) {
    to.to_lower(in.x);
    to.to_float(in.weight, in.bias);
  }
};

// The step is not differentiable: raises an error if a gradient is needed.
at::Tensor update_autograd(c10::DispatchKeySet keys, const UpdateInputs& in) {
  const auto& op = operator_of<CausalConv1dUpdate>();
  op.check(in);
  const auto has_tangent = [](const auto&... tensors) { return (torch::autograd::isFwGradDefined(tensors) || ...); };
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(in.x, in.conv_state, in.weight, in.bias), kUpdateOp,
                              ": forward-mode differentiation is not supported");
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::compute_requires_grad(in.x, in.conv_state, in.weight, in.bias), kUpdateOp,
                              " is not differentiable: train with causal_conv1d, and decode under torch.no_grad()");
  at::AutoDispatchBelowAutograd guard;
  return op.redispatch(keys & c10::after_autograd_keyset, in);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { implement<&causal_conv1d>(m, "causal_conv1d"); }

SSM_DIFFERENTIABLE_OPERATOR(CausalConv1d)

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) { implement<&update_autograd>(m, "causal_conv1d_update"); }

SSM_IN_PLACE_OPERATOR(CausalConv1dUpdate)

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  register_kernels<&meta<check_inputs, allocate_fwd, Inputs>, &meta<check_inputs, allocate_bwd, BwdInputs>,
                   &meta<check_update_inputs, allocate_update, UpdateInputs>>(m);
}

}  // namespace ssm_kernels::causal_conv1d
