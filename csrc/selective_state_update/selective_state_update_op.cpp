// selective_state_update on every device: checks, conversion to plain data, Meta, Autograd and Autocast.

#include "selective_state_update/selective_state_update_op.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/memory_overlap.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_state_update {
namespace {

constexpr char kOp[] = "selective_state_update";

// Sizes of the two forms, by the names that the error messages use.
struct Form {
  const char *state, *input, *A, *parameter, *channels;
};
constexpr Form kWithChannels{"(batch, dim, dstate)", "(batch, dim)", "(dim, dstate)", "(dim,)", "dim"};
constexpr Form kWithHeads{"(batch, heads, headdim, dstate)", "(batch, heads, headdim)", "(heads, headdim, dstate)",
                          "(heads, headdim)", "heads"};

void check_parameter(const ArgumentChecks& checks, const char* name, const OptionalTensor& tensor, const char* axes,
                     c10::SymIntArrayRef shape, const Inputs& in) {
  if (!is_present(tensor)) return;
  const bool is_input_dtype = tensor->scalar_type() == in.x.scalar_type();
  checks.tensor(name, *tensor, axes, shape, is_input_dtype ? in.x.scalar_type() : checks.accumulate());
}

}  // namespace

Discretization check_inputs(const Inputs& in) {
  check_defined(kOp, "state", in.state);
  check_defined(kOp, "B", in.B);
  const ArgumentChecks checks(kOp, "x", in.x);
  TORCH_CHECK_VALUE(in.state.dim() == 3 || in.state.dim() == 4, kOp, ": expected state of shape ", kWithChannels.state, " or ",
                    kWithHeads.state, ", got ", in.state.sym_sizes());
  const bool has_heads = in.state.dim() == 4;
  const Form& form = has_heads ? kWithHeads : kWithChannels;
  checks.rank("x", in.x, in.state.dim() - 1, form.input);

  const at::ScalarType dtype = in.x.scalar_type();
  const c10::SymInt batch = in.x.sym_size(0), dstate = in.state.sym_size(-1);
  const c10::SymIntArrayRef channels = in.x.sym_sizes().slice(1);
  c10::SymDimVector channels_dstate(channels.begin(), channels.end());
  channels_dstate.push_back(dstate);
  c10::SymDimVector state_shape(channels_dstate);
  state_shape.insert(state_shape.begin(), is_present(in.state_batch_indices) ? in.state.sym_size(0) : batch);

  checks.tensor("state", in.state, form.state, state_shape, in.state.scalar_type() == dtype ? dtype : checks.accumulate());
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, kOp, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  checks.tensor("dt", in.dt, form.input, in.x.sym_sizes(), dtype);
  check_defined(kOp, "A", in.A);
  check_parameter(checks, "A", in.A, form.A, channels_dstate, in);
  TORCH_CHECK_VALUE(in.B.dim() == 2 || in.B.dim() == 3, kOp,
                    ": expected B of shape (batch, dstate) or (batch, groups, dstate), got ", in.B.sym_sizes());
  if (in.B.dim() == 2) {
    checks.tensor("B", in.B, "(batch, dstate)", {batch, dstate}, dtype);
    checks.tensor("C", in.C, "(batch, dstate)", {batch, dstate}, dtype);
  } else {
    const c10::SymInt groups = in.B.sym_size(1);
    checks.tensor("B", in.B, "(batch, groups, dstate)", {batch, groups, dstate}, dtype);
    TORCH_CHECK_VALUE(groups > 0 && channels[0] % groups == 0, kOp, ": expected the groups of B and C to divide ",
                      form.channels, " = ", channels[0], ", got ", groups);
    checks.tensor("C", in.C, "(batch, groups, dstate)", {batch, groups, dstate}, dtype);
  }
  check_parameter(checks, "D", in.D, form.parameter, channels, in);
  checks.tensor("z", in.z, form.input, in.x.sym_sizes(), dtype);
  check_parameter(checks, "dt_bias", in.dt_bias, form.parameter, channels, in);
  checks.indices("state_batch_indices", in.state_batch_indices, "(batch,)", {batch});
  const auto [dt_min, dt_max] = parse_dt_limit(kOp, in.dt_limit);
  check_dt_limit(kOp, dt_min, dt_max);
  return parse_discretization(kOp, in.discretization);
}

at::Tensor allocate_out(const Inputs& in) { return at::empty_symint(in.x.sym_sizes(), in.x.options()); }

namespace {

// Zero for an axis of size 1, whose stride is arbitrary and may be unaligned.
int64_t stride_of(const at::Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

// Without an axis of heads there is one head, whose stride is not used.
ChannelView batched_view(const at::Tensor& tensor, Access access) {
  return {data_of(tensor, access), stride_of(tensor, 0), tensor.dim() == 3 ? stride_of(tensor, 1) : 0, stride_of(tensor, -1)};
}

ChannelView parameter_view(const at::Tensor& tensor) {
  return {data_of(tensor, Access::kRead), 0, tensor.dim() == 2 ? stride_of(tensor, 0) : 0, stride_of(tensor, -1)};
}

GroupView group_view(const at::Tensor& tensor) {
  return {data_of(tensor, Access::kRead), stride_of(tensor, 0), tensor.dim() == 3 ? stride_of(tensor, 1) : 0,
          stride_of(tensor, -1)};
}

}  // namespace

StateUpdateParams make_params(const Inputs& in, Discretization method, const at::Tensor& out) {
  check_in_place(kOp, "state", in.state,
                 {{"x", in.x},
                  {"dt", in.dt},
                  {"A", in.A},
                  {"B", in.B},
                  {"C", in.C},
                  {"D", in.D},
                  {"z", in.z},
                  {"dt_bias", in.dt_bias},
                  {"state_batch_indices", in.state_batch_indices}});
  const bool has_heads = in.state.dim() == 4;
  StateUpdateParams params;
  params.batch = in.x.size(0);
  params.slots = in.state.size(0);
  params.heads = has_heads ? in.x.size(1) : 1;
  params.headdim = in.x.size(-1);
  params.groups = in.B.dim() == 3 ? in.B.size(1) : 1;
  params.dstate = in.state.size(-1);
  params.discretization = method;
  params.dt_softplus = in.dt_softplus;
  params.A_is_log = in.A_is_log;
  const auto [dt_min, dt_max] = parse_dt_limit(kOp, in.dt_limit);
  params.dt_min = dt_min;
  params.dt_max = dt_max;
  params.input_kind = scalar_kind(in.x.scalar_type());
  params.state_kind = scalar_kind(in.state.scalar_type());

  params.state = {in.state.mutable_data_ptr(), stride_of(in.state, 0), has_heads ? stride_of(in.state, 1) : 0,
                  stride_of(in.state, -2), stride_of(in.state, -1)};
  params.A = {data_of(in.A, Access::kRead), 0, has_heads ? stride_of(in.A, 0) : 0, stride_of(in.A, -2), stride_of(in.A, -1)};
  params.A_is_input_kind = in.A.scalar_type() == in.x.scalar_type();
  params.x = batched_view(in.x, Access::kRead);
  params.dt = batched_view(in.dt, Access::kRead);
  params.out = batched_view(out, Access::kWrite);
  params.B = group_view(in.B);
  params.C = group_view(in.C);
  if (is_present(in.z)) params.z = batched_view(*in.z, Access::kRead);
  if (is_present(in.D)) {
    params.D = parameter_view(*in.D);
    params.D_is_input_kind = in.D->scalar_type() == in.x.scalar_type();
  }
  if (is_present(in.dt_bias)) {
    params.dt_bias = parameter_view(*in.dt_bias);
    params.dt_bias_is_input_kind = in.dt_bias->scalar_type() == in.x.scalar_type();
  }
  if (is_present(in.state_batch_indices)) {
    const at::Tensor& indices = *in.state_batch_indices;
    params.indices = {indices.const_data_ptr(), indices.scalar_type() == at::kLong, indices.stride(0)};
  }
  return params;
}

namespace {

struct SelectiveStateUpdate : InPlaceOp<Inputs> {
  static constexpr char kSchema[] = "ssm_kernels::selective_state_update";

  static const at::Tensor& written(const Inputs& in) { return in.state; }

  // Inputs in the autocast dtype, parameters in float32. The state is written to and is not cast.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.dt, in.B, in.C, in.z);
    to.to_float(in.A, in.D, in.dt_bias);
  }
};

// A node that raises when backward reaches it. PyTorch holds nodes by std::shared_ptr, in newer versions by intrusive_ptr.
template <typename Pointer = decltype(torch::autograd::Edge::function)>
Pointer make_error_node(torch::autograd::edge_list inputs) {
  constexpr bool kIsShared = std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>;
  using Node = std::enable_if_t<sizeof(Pointer) != 0, torch::autograd::Error>;  // a dependent name: one branch is looked into
  const char message[] =
      "selective_state_update is not differentiable, neither in its output nor in the state that it updates: train with "
      "selective_scan, and decode under torch.no_grad()";
  if constexpr (kIsShared) {
    return Pointer(new Node(message, std::move(inputs)), [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>(message, std::move(inputs));
  }
}

// If an input requires a gradient, attaches error nodes to the output and to the state, so that backward raises.
at::Tensor autograd(c10::DispatchKeySet keys, const Inputs& in) {
  const auto& op = operator_of<SelectiveStateUpdate>();
  op.check(in);
  const auto apply = [&](const auto& function) {
    return function(in.state, in.x, in.dt, in.A, in.B, in.C, in.D, in.z, in.dt_bias);
  };
  TORCH_CHECK_NOT_IMPLEMENTED(!apply([](const auto&... tensors) { return (torch::autograd::isFwGradDefined(tensors) || ...); }),
                              kOp, ": forward-mode differentiation is not supported");
  const bool needs_graph = apply([](const auto&... tensors) { return torch::autograd::compute_requires_grad(tensors...); });
  torch::autograd::edge_list edges;
  if (needs_graph) {
    torch::autograd::check_inplace(in.state, true);
    edges = apply([](const auto&... tensors) { return torch::autograd::collect_next_edges(tensors...); });
  }
  at::Tensor out;
  {
    at::AutoDispatchBelowAutograd guard;
    out = op.redispatch(keys & c10::after_autograd_keyset, in);
  }
  if (needs_graph) {
    torch::autograd::set_history(out, make_error_node(edges));
    torch::autograd::rebase_history(in.state, make_error_node(edges));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) { implement<&autograd>(m, "selective_state_update"); }

SSM_IN_PLACE_OPERATOR(SelectiveStateUpdate)

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement<&meta<check_inputs, allocate_out, Inputs>>(m, "selective_state_update"); }

}  // namespace ssm_kernels::selective_state_update
