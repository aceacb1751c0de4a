// selective_scan on every device: checks, allocation, conversion to plain data, Meta, Autograd and Autocast.

#include "selective_scan/selective_scan_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <map>

#include "selective_scan/dense.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/states_at.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_scan {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // Selective scan: h_t = Abar(z_t) h_{t-1} + delta_t k(z_t) B_t u_t with z = delta A; out = (<C, h> + D u) silu(z). With
  // reverse, h_t follows from h_{t+1}.
  schemas.def(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? delta_bias=None, Tensor? initial_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, *, "
      "str discretization='zoh', bool delta_softplus=False, bool reverse=False) -> (Tensor out, Tensor last_state)");
  // The scan, and its states at positions: as ops/_states_at.py describes.
  schemas.def(
      "_selective_scan_states_at(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, str discretization, bool "
      "delta_softplus, "
      "bool reverse, int[] states_at, bool by_pieces) -> (Tensor out, Tensor last_state, Tensor states)");
  // The scan, and the state at each chunk boundary, from which backward recomputes the states inside it.
  schemas.kernels(
      "_selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, str discretization, bool delta_softplus, bool save_chunk_states, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, bool reverse=False) -> (Tensor out, Tensor last_state, Tensor chunk_states)");
  // The kernels that forward and backward of a call take, "name, channels of a block, segments and spans of time". For tests.
  schemas.kernels(
      "_selective_scan_plan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, str discretization, bool delta_softplus, Tensor? seq_idx=None, Tensor? cu_seqlens=None, "
      "bool reverse=False) -> (str forward, str backward)");
  // The scan's adjoint. Gradients that are absent or not needed have no elements; the last of needs_grad is of initial_state,
  // an argument of packed calls: chunk_states have that of others.
  schemas.kernels(
      "_selective_scan_bwd(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor chunk_states, str discretization, bool delta_softplus, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool reverse, bool[9] needs_grad) "
      "-> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
      "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state)");
  // The same for the last reader of chunk_states, which may lose their values.
  schemas.kernels(
      "_selective_scan_bwd_last(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor "
      "C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor(a!) chunk_states, str discretization, bool delta_softplus, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool reverse, bool[9] needs_grad) "
      "-> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
      "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state)");
  // As _selective_scan_bwd, but writes grad_z, and grad_delta if given, into the caller's tensors, which may be column slices.
  // The second result then has no elements. chunk_states lose their values only with reuses_chunk_states. `out` receives the
  // outputs of forward; a copy of grad_out precedes them unless it is the memory of grad_out.
  schemas.kernels(
      "_selective_scan_bwd_out(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, "
      "Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, Tensor(c!) chunk_states, str discretization, bool delta_softplus, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool reverse, bool[9] needs_grad, Tensor(a!) grad_z, "
      "Tensor(b!)? grad_delta=None, bool reuses_chunk_states=False, Tensor(d!)? out=None) "
      "-> (Tensor grad_u, Tensor, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_delta_bias, Tensor "
      "grad_initial_state)");
  schemas.refuse_nested("selective_scan");
}

namespace {

constexpr char kOp[] = "selective_scan";

const char* states_axes(const Inputs& in) {
  return is_present(in.cu_seqlens) ? "(sequences, dim, dstate)" : "(batch, dim, dstate)";
}

c10::SymDimVector states_shape(const Inputs& in) {
  return {count_states(in.cu_seqlens, in.u.sym_size(0)), in.u.sym_size(1), in.A.sym_size(1)};
}

// Kernels write the states of all rows. With seq_idx a sequence without steps has no row: its state is copied from `empty`.
at::Tensor allocate_states(const Inputs& in, const OptionalTensor& empty) {
  const c10::SymDimVector shape = states_shape(in);
  if (!is_present(in.seq_idx)) return empty_tensor(shape, in.A.options());
  return ssm_kernels::allocate_states(in.cu_seqlens, in.u.sym_size(2), shape, in.A.options(), empty);
}

// Names the layout of a u whose last axis, not the second, has as many entries as A has rows, unless B says that it is time.
void check_layout(const char* op, const Inputs& in) {
  const c10::SymInt channels = in.A.sym_size(0), last = in.u.sym_size(2);
  if (in.is_dense && channels == 1) return;
  if (in.u.sym_size(1) == channels || last != channels || (in.B.dim() > 2 && in.B.sym_size(-1) == last)) return;
  TORCH_CHECK_VALUE(false, op, ": expected u of shape (batch, dim, seqlen) with dim = ", channels,
                    ", the rows of A, got (batch, seqlen, dim) = ", in.u.sym_sizes(),
                    ": pass u.transpose(1, 2), and delta, z, B and C likewise");
}

void check_matrix(const ArgumentChecks& checks, const char* name, const at::Tensor& matrix, const Inputs& in) {
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), seqlen = in.u.sym_size(2), dstate = in.A.sym_size(1);
  const at::ScalarType dtype = in.is_complex ? checks.accumulate() : in.u.scalar_type();
  switch (matrix.dim()) {
    case 2:
      return checks.tensor(name, matrix, "(dim, dstate)", {dim, dstate}, checks.accumulate());
    case 3:
      return checks.tensor(name, matrix, "(batch, dstate, seqlen)", {batch, dstate, seqlen}, dtype);
    case 4: {
      // In the layout (batch, seqlen, groups, dstate) the groups are the third axis: the check then says how to reorder.
      const bool is_swapped = matrix.sym_size(2) != dstate && matrix.sym_size(3) == dstate && matrix.sym_size(1) == seqlen;
      const c10::SymInt groups = matrix.sym_size(is_swapped ? 2 : 1);
      checks.tensor(name, matrix, "(batch, groups, dstate, seqlen)", {batch, groups, dstate, seqlen}, dtype);
      TORCH_CHECK_VALUE(groups > 0 && dim % groups == 0, checks.op(), ": expected the groups of ", name,
                        " to divide dim = ", dim, ", got ", groups);
      return;
    }
    default:
      TORCH_CHECK_VALUE(false, checks.op(), ": expected ", name,
                        " of shape (dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen), got ",
                        matrix.sym_sizes());
  }
}

}  // namespace

Discretization check_inputs_of(const char* op, const Inputs& in, bool (*is_supported)(Discretization), bool lists_all) {
  const ArgumentChecks checks(op, "u", in.u);
  checks.rank("u", in.u, 3, "(batch, dim, seqlen)");
  checks.rank("A", in.A, in.is_dense ? 3 : 2, in.is_dense ? "(dim, dstate, dstate) or (1, dstate, dstate)" : "(dim, dstate)");
  check_defined(op, "B", in.B);
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), dstate = in.A.sym_size(1);
  const at::ScalarType dtype = in.u.scalar_type(), accumulate = checks.accumulate();
  check_layout(op, in);
  checks.tensor("delta", in.delta, "(batch, dim, seqlen)", in.u.sym_sizes(), dtype);
  if (in.is_dense) {
    const bool is_shared = in.A.sym_size(0) == 1;
    checks.tensor("A", in.A, is_shared ? "(1, dstate, dstate)" : "(dim, dstate, dstate)",
                  {is_shared ? c10::SymInt(1) : dim, dstate, dstate}, accumulate);
  } else {
    checks.tensor("A", in.A, "(dim, dstate)", {dim, dstate}, accumulate);
  }
  const int64_t largest = in.is_dense ? kMaxDenseDstate : kMaxDstate;
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= largest, op, ": expected dstate from 1 to ", largest,
                    in.is_dense ? " with a matrix A for each channel" : "", ", got ", dstate);
  check_matrix(checks, "B", in.B, in);
  check_matrix(checks, "C", in.C, in);
  checks.tensor("D", in.D, "(dim,)", {dim}, accumulate);
  checks.tensor("z", in.z, "(batch, dim, seqlen)", in.u.sym_sizes(), dtype);
  checks.tensor("delta_bias", in.delta_bias, "(dim,)", {dim}, accumulate);
  check_sequences(checks, in.seq_idx, in.cu_seqlens, batch, in.u.sym_size(2));
  checks.tensor("initial_state", in.initial_state, states_axes(in), states_shape(in), accumulate);
  return parse_discretization(op, in.discretization, is_supported, lists_all);
}

Discretization check_inputs(const Inputs& in) { return check_inputs_of(kOp, in, &is_one_sample, /*lists_all=*/true); }

namespace {

c10::SymInt chunk_boundaries(const Inputs& in) {
  const c10::SymInt seqlen = in.u.sym_size(2);
  return in.is_dense ? dense_chunk_boundary_count(seqlen) : chunk_boundary_count(seqlen, in.A.sym_size(1));
}

}  // namespace

FwdOutputs allocate_fwd(const Inputs& in) {
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), dstate = in.A.sym_size(1);
  const c10::SymInt boundaries = in.save_chunk_states ? chunk_boundaries(in) : c10::SymInt(0);
  return {empty_tensor_like(in.u), allocate_states(in, in.initial_state),
          empty_tensor({batch, boundaries, dim, dstate}, in.A.options())};
}

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const c10::SymInt batch = in.u.sym_size(0), dim = in.u.sym_size(1), dstate = in.A.sym_size(1);
  const ArgumentChecks checks("selective_scan backward", "u", in.u);
  checks.tensor("grad_out", bwd.grad_out, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());
  checks.tensor("grad_last_state", bwd.grad_last_state, states_axes(in), states_shape(in), checks.accumulate());
  checks.tensor("initial_state", in.packed_initial_state, states_axes(in), states_shape(in), checks.accumulate());
  checks.tensor("chunk_states", bwd.chunk_states, "(batch, chunks + 1, dim, dstate)",
                {batch, chunk_boundaries(in), dim, dstate}, checks.accumulate());
  TORCH_CHECK_VALUE(is_present(in.z) || !is_present(bwd.grad_z),
                    "selective_scan backward: expected z with bwd.grad_z, got None");
  checks.tensor("grad_z", bwd.grad_z, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());
  checks.tensor("grad_delta", bwd.grad_delta, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());
  TORCH_CHECK_VALUE(is_present(bwd.grad_out) || !is_present(bwd.out),
                    "selective_scan backward: expected grad_out with out, got None");
  checks.tensor("out", bwd.out, "(batch, dim, seqlen)", in.u.sym_sizes(), in.u.scalar_type());

  const auto parameter = [](const at::Tensor& like) { return empty_tensor(like.sym_sizes(), like.options()); };
  const auto sequence = [](const at::Tensor& like) { return empty_tensor_like(like); };
  const auto matrix = [&](const at::Tensor& like) { return like.dim() == 2 ? parameter(like) : sequence(like); };
  const auto absent = [&] { return empty_tensor({0}, in.A.options()); };
  const auto allocate = [&](Grad grad, const OptionalTensor& input, const auto& allocate_like) {
    return is_present(input) && bwd.needs_grad[grad] ? allocate_like(*input) : absent();
  };
  return {allocate(kGradU, in.u, sequence),
          is_present(bwd.grad_delta) ? *bwd.grad_delta : allocate(kGradDelta, in.delta, sequence),
          allocate(kGradA, in.A, parameter),
          allocate(kGradB, in.B, matrix),
          allocate(kGradC, in.C, matrix),
          allocate(kGradD, in.D, parameter),
          is_present(bwd.grad_z) ? *bwd.grad_z : allocate(kGradZ, in.z, sequence),
          allocate(kGradDeltaBias, in.delta_bias, parameter),
          bwd.needs_grad[kGradInitialState] ? allocate_states(in, bwd.grad_last_state) : absent()};
}

namespace {

// The view of a tensor whose last axis is time, with the steps in the opposite order. The data of an empty tensor may be null,
// which would be taken for that of an absent one.
template <typename View>
View reversed(View view, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return view;
  view.data = static_cast<char*>(view.data) + (tensor.size(-1) - 1) * view.stride_step * tensor.element_size();
  view.stride_step = -view.stride_step;
  return view;
}

}  // namespace

SequenceView sequence_view(const OptionalTensor& tensor, Access access, bool reverse) {
  if (!is_present(tensor)) return {};
  const SequenceView view{data_of(*tensor, access), tensor->stride(0), tensor->stride(1), tensor->stride(2)};
  return reverse ? reversed(view, *tensor) : view;
}

MatrixView matrix_view(const at::Tensor& t, Access access, bool reverse) {
  void* const data = data_of(t, access);
  if (t.dim() == 2) return {data, false, 1, 0, t.stride(0), t.stride(1), 0};
  const MatrixView view = t.dim() == 3 ? MatrixView{data, true, 1, t.stride(0), 0, t.stride(1), t.stride(2)}
                                       : MatrixView{data, true, t.size(1), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  return reverse ? reversed(view, t) : view;
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

void fill_params(SelectiveScanParams& params, const Inputs& in, Discretization method, const PackedRows& rows) {
  params.batch = params.rows = in.u.size(0);
  if (rows.fields.defined()) {
    params.rows = rows.fields.size(0);
    params.row_fields = rows.fields.const_data_ptr<int64_t>();
  } else if (rows.cu_seqlens.defined()) {
    params.rows = rows.cu_seqlens.size(0) - 1;
    params.cu_seqlens = rows.cu_seqlens.const_data_ptr<int64_t>();
  }
  params.dim = in.u.size(1);
  params.seqlen = in.u.size(2);
  params.dstate = in.A.size(1);
  params.chunk_length = in.is_dense ? kDenseChunk : chunk_length(params.dstate);
  params.chunk_boundaries =
      in.is_dense ? dense_chunk_boundary_count(params.seqlen) : chunk_boundary_count(params.seqlen, params.dstate);
  params.discretization = method;
  params.delta_softplus = in.delta_softplus;
  params.u = sequence_view(in.u, Access::kRead, in.reverse);
  params.delta = sequence_view(in.delta, Access::kRead, in.reverse);
  params.z = sequence_view(in.z, Access::kRead, in.reverse);
  params.B = matrix_view(in.B, Access::kRead, in.reverse);
  params.C = matrix_view(in.C, Access::kRead, in.reverse);
  if (!in.is_dense) params.A = state_view(in.A);
  params.D = channel_view(in.D);
  params.delta_bias = channel_view(in.delta_bias);
}

namespace {

// The fields of the sequences of cu_seqlens in a reverse scan. Nobody has checked the values while a CUDA graph is captured: no
// row may leave the tensors.
at::Tensor reversed_sequences(const at::Tensor& cu_seqlens, int64_t seqlen) {
  const at::Tensor offsets = cu_seqlens.to(at::kLong), begins = offsets.slice(0, 0, -1).clamp(0, seqlen);
  const at::Tensor ends = at::maximum(offsets.slice(0, 1), begins).clamp_max(seqlen);
  const at::Tensor states = at::arange(begins.size(0), begins.options());
  return at::stack({at::zeros_like(states), seqlen - ends, seqlen - begins, states, states}, 1);
}

// The same parts of rows in the opposite order of time: each begins where it ended, and starts from the state that it ended in.
at::Tensor reversed_parts(const at::Tensor& parts, int64_t seqlen) {
  const auto field = [&](int64_t i) { return parts.select(1, i); };
  return at::stack({field(0), seqlen - field(2), seqlen - field(1), field(4), field(3)}, 1);
}

}  // namespace

PackedRows make_packed_rows(const Inputs& in) {
  PackedRows rows;
  const int64_t seqlen = in.u.size(2);
  if (is_present(in.seq_idx)) {
    rows.fields = sequence_parts(*in.seq_idx, in.cu_seqlens);
    if (in.reverse) rows.fields = reversed_parts(rows.fields, seqlen);
  } else if (is_present(in.cu_seqlens) && in.reverse) {
    rows.fields = reversed_sequences(*in.cu_seqlens, seqlen);
  } else if (is_present(in.cu_seqlens)) {
    rows.cu_seqlens = in.cu_seqlens->to(at::kLong).contiguous();
  }
  if (in.is_packed() && is_present(in.packed_initial_state)) rows.initial_state = in.packed_initial_state->contiguous();
  return rows;
}

SelectiveScanFwdParams make_fwd_params(const Inputs& in, Discretization method, const PackedRows& rows,
                                       const FwdOutputs& outputs) {
  SelectiveScanFwdParams params;
  fill_params(params, in, method, rows);
  params.initial_state = state_view(in.initial_state);
  params.out = sequence_view(outputs.out, Access::kWrite, in.reverse);
  params.last_state = outputs.last_state.data_ptr();
  if (outputs.chunk_states.size(1) > 0) params.chunk_states = outputs.chunk_states.data_ptr();
  return params;
}

SelectiveScanBwdParams make_bwd_params(const BwdInputs& bwd, Discretization method, const PackedRows& rows,
                                       const at::Tensor& chunk_states, const GradTensors& grads) {
  SelectiveScanBwdParams params;
  fill_params(params, bwd.in, method, rows);
  params.initial_state = state_view(rows.initial_state);
  const bool reverse = bwd.in.reverse;
  params.grad_out = sequence_view(bwd.grad_out, Access::kRead, reverse);
  if (is_present(bwd.out)) {
    const at::Tensor &out = *bwd.out, &grad_out = *bwd.grad_out;
    if (out.const_data_ptr() != grad_out.const_data_ptr() || out.strides() != grad_out.strides()) out.copy_(grad_out);
    params.grad_out = sequence_view(out, Access::kWrite, reverse);
    params.replaces_grad_out = true;
  }
  params.grad_last_state = state_view(bwd.grad_last_state);
  params.chunk_states = chunk_states.const_data_ptr();
  const auto sequence = [&](Grad grad) {
    return grads[grad].numel() > 0 ? sequence_view(grads[grad], Access::kWrite, reverse) : SequenceView();
  };
  const auto matrix = [&](Grad grad) {
    return grads[grad].numel() > 0 ? matrix_view(grads[grad], Access::kWrite, reverse) : MatrixView();
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

// Saves the inputs and the states at the chunk boundaries, and the initial state of a packed call.
struct SelectiveScan : DifferentiableOp<SelectiveScan, BwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::selective_scan", kBackward[] = "ssm_kernels::_selective_scan_bwd";
  static constexpr bool kIsPublic = true;

  static const char* name(const Inputs&) { return kOp; }

  static auto differentiable(Inputs& in) { return std::tuple_cat(in.fields_but_state(), std::tie(in.initial_state)); }

  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<FwdOutputs, FwdInputs> op("ssm_kernels::_selective_scan_fwd");
    in.save_chunk_states = saved != nullptr;
    in.has_initial_state = is_present(in.initial_state);
    if (saved != nullptr && in.is_packed()) in.packed_initial_state = in.initial_state;
    FwdOutputs outputs = op(in);
    if (saved != nullptr) saved->push_back(std::move(outputs.chunk_states));
    return {std::move(outputs.out), std::move(outputs.last_state)};
  }

  static auto saved_fields(Inputs& in) {
    return std::tuple_cat(in.fields_but_state(), std::tie(in.packed_initial_state, in.seq_idx, in.cu_seqlens, in.discretization,
                                                          in.delta_softplus, in.reverse, in.has_initial_state));
  }

  static NeedsGrad has_edges(Inputs& in) {
    NeedsGrad edges = DifferentiableOp::has_edges(in);
    edges[kGradInitialState] = in.has_initial_state;
    return edges;
  }

  static GradTensors backward(BwdInputs& bwd) {
    const bool is_last = runs_eagerly() && frees_saved_tensors() &&
                         has_plain_tensors(std::tuple_cat(bwd.in.fields_but_state(), bwd.saved(), bwd.grads()));
    if (!is_last) return DifferentiableOp::backward(bwd);
    static const Operator<GradTensors, BwdInputs> op("ssm_kernels::_selective_scan_bwd_last");
    return op(bwd);
  }

  // Sequences in the autocast dtype; parameters and states in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.u, in.delta, in.z);
    to.to_float(in.A, in.D, in.delta_bias, in.initial_state);
    for (at::Tensor* matrix : {&in.B, &in.C}) matrix->dim() == 2 ? to.to_float(*matrix) : to.to_lower(*matrix);
  }
};

// The scan, and its states at positions. A composition of operators, so that autograd, vmap and exporters know only those.
struct SelectiveScanStatesAt {
  static constexpr char kSchema[] = "ssm_kernels::_selective_scan_states_at";
  static constexpr bool kIsPublic = false;
  using Inputs = StatesAtInputs<selective_scan::Inputs>;
  using Result = StatesAt;

  static void cast(Inputs& in, const Autocast& to) {
    operator_of<SelectiveScan>().check(in);
    SelectiveScan::cast(in, to);
  }

  static StatesAt call(Inputs& in) {
    operator_of<SelectiveScan>().check(in);
    check_inputs(in);
    const c10::SymInt seqlen = in.u.sym_size(2);
    check_states_at(kOp, in.states_at, seqlen, in.reverse);
    const auto needs_graph = [](const auto&... tensors) { return (needs_autograd(tensors) || ...); };
    if (!in.by_pieces && !in.is_packed() && !std::apply(needs_graph, SelectiveScan::differentiable(in))) return from_chunks(in);
    const bool is_transposed = in.u.sym_stride(1) == 1 && in.u.sym_stride(2) != 1;  // out has the layout of u
    const auto scan = [&](const Piece& piece) -> std::vector<at::Tensor> {
      const auto [out, last_state] = operator_of<SelectiveScan>()(part_of(in, piece));
      return {out, last_state};
    };
    return scan_pieces({seqlen, 2, is_transposed, one_state(in.initial_state), in.seq_idx, in.cu_seqlens, scan}, in.states_at)
        .of_one();
  }

 private:
  static selective_scan::Inputs part_of(const selective_scan::Inputs& in, const Piece& piece) {
    selective_scan::Inputs part = in;
    piece.cut(-1, part.u, part.delta, part.z, part.seq_idx);
    for (at::Tensor* matrix : {&part.B, &part.C}) {
      if (matrix->dim() > 2) piece.cut(-1, *matrix);
    }
    part.initial_state = piece.state();
    part.cu_seqlens = piece.cu_seqlens;
    return part;
  }

  // Forward returns the states at multiples of the chunk; short pieces lead from those to the others.
  static StatesAt from_chunks(const Inputs& in) {
    static const Operator<FwdOutputs, FwdInputs> op("ssm_kernels::_selective_scan_fwd");
    selective_scan::Inputs whole = in;
    whole.save_chunk_states = true;
    const FwdOutputs outputs = op(whole);
    const int64_t chunk = chunk_length(in.A.sym_size(1)).guard_int(__FILE__, __LINE__);
    std::map<int64_t, at::Tensor> states;
    for (const int64_t position : in.states_at) {
      if (position == in.u.sym_size(2) || states.count(position) > 0) continue;
      const int64_t begin = position / chunk * chunk;
      at::Tensor state = outputs.chunk_states.select(1, position / chunk);
      if (position != begin) {
        selective_scan::Inputs part = part_of(in, {begin, position, {state}, {}});
        part.D = part.z = {};
        part.C = part.B;
        state = std::get<1>(operator_of<SelectiveScan>()(part));
      }
      states[position] = state;
    }
    if (in.u.sym_size(2) == 0) states[0] = outputs.last_state;
    return {outputs.out, outputs.last_state, stack_states(in.states_at, states, outputs.last_state)};
  }
};

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(SelectiveScan)
SSM_AUTOCAST_OPERATOR(SelectiveScanStatesAt)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&SelectiveScanStatesAt::call>(m, SelectiveScanStatesAt::kSchema);
}

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) {
  register_kernels<&meta<check_inputs, allocate_fwd, FwdInputs>, &meta<check_inputs, allocate_bwd, BwdInputs>>(m);
}

}  // namespace ssm_kernels::selective_scan
