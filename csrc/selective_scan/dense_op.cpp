// selective_scan_dense on every device: checks, allocation, conversion to plain data, Meta, Autograd and Autocast.

#include "selective_scan/dense_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "common/integers.h"
#include "selective_scan/two_sample_states_at.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_scan {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The selective scan with a matrix A, (dim, dstate, dstate) or (1, dstate, dstate), and a rule that is a rational function or
  // a polynomial: dense.h. States are (batch, dim, dstate), as A, B and C given. previous as selective_scan_two_sample.
  const std::string tensors =
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, Tensor? initial_state, "
      "Tensor? previous_u, Tensor? previous_B, Tensor? seq_idx, Tensor? cu_seqlens";
  const std::string options = "str discretization, bool repeats_first, bool delta_softplus, bool reverse";
  schemas.def(
      "selective_scan_dense(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? delta_bias=None, Tensor? initial_state=None, Tensor? previous_u=None, Tensor? previous_B=None, "
      "Tensor? seq_idx=None, Tensor? cu_seqlens=None, *, str discretization, bool repeats_first=False, "
      "bool delta_softplus=False, bool reverse=False) -> (Tensor out, Tensor last_state)");
  schemas.refuse_nested("selective_scan_dense");
  // As _selective_scan_two_sample_states_at.
  schemas.def("_selective_scan_dense_states_at(" + tensors + ", " + options +
              ", int[] states_at) -> (Tensor out, Tensor last_state, Tensor last_u, Tensor last_B, Tensor states, "
              "Tensor states_u, Tensor states_B)");
  // chunk_states are those of Q^T h.
  schemas.kernels("_selective_scan_dense_fwd(" + tensors + ", " + options +
                  ", bool save_chunk_states) -> (Tensor out, Tensor last_state, Tensor chunk_states)");
  // Gradients that are absent or not needed have no elements. initial_state is an argument of packed calls: chunk_states have
  // that of others.
  schemas.kernels("_selective_scan_dense_bwd(Tensor? grad_out, Tensor? grad_last_state, " + tensors +
                  ", Tensor chunk_states, " + options +
                  ", bool[11] needs_grad) -> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
                  "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state, Tensor grad_previous_u, "
                  "Tensor grad_previous_B)");
}

namespace {

constexpr char kDenseOp[] = "selective_scan";

bool is_dense_rule(Discretization method) {
  switch (method) {
    case Discretization::kBilinear:
    case Discretization::kEuler:
    case Discretization::kBackwardEuler:
    case Discretization::kGbt:
    case Discretization::kRk4:
    case Discretization::kTrapezoidal:
    case Discretization::kGbtTwoSample:
      return true;
    default:
      return false;
  }
}

// The places of gradients, before those of Grad, in TwoSampleBwd.
constexpr int kPreviousPlaces[] = {kGradPreviousU, kGradPreviousB};

TwoSampleBwdInputs two_sample_inputs(const DenseBwdInputs& bwd) {
  TwoSampleBwdInputs two;
  two.grad_out = bwd.grad_out;
  two.grad_last_state = bwd.grad_last_state;
  two.in = bwd.in;
  two.chunk_states = bwd.chunk_states;
  std::copy_n(bwd.needs_grad.begin(), kNumGrads, two.needs_grad.begin());
  for (int i = 0; i < 2; ++i) two.needs_grad[kPreviousPlaces[i]] = bwd.needs_grad[kNumGrads + i];
  return two;
}

}  // namespace

Discretization check_dense_inputs(const DenseInputs& in) {
  const Discretization method = check_inputs_of(kDenseOp, in, [](Discretization) { return true; }, /*lists_all=*/true);
  TORCH_CHECK_VALUE(
      is_dense_rule(method), kDenseOp,
      ": expected discretization 'bilinear', 'trapezoidal', 'gbt', 'gbt_two_sample', 'euler', 'backward_euler' or "
      "'rk4' with A of shape (dim, dstate, dstate), got '",
      in.discretization,
      "', which needs the exponential of a matrix in each step: ssm_kernels.reference.selective_scan computes it");
  TORCH_CHECK_VALUE(is_two_sample(method) || (!is_present(in.previous_u) && !is_present(in.previous_B) && !in.repeats_first),
                    kDenseOp, ": expected previous with a discretization that reads two input samples, got '",
                    in.discretization, "'");
  check_previous(ArgumentChecks(kDenseOp, "u", in.u), in);
  return method;
}

DenseParams make_dense_params(const DenseInputs& in, Discretization method, const SelectiveScanParams& scan,
                              const at::Tensor& schur, int64_t channels, int64_t slots) {
  const TwoSampleParams two = make_two_sample_params(in);
  DenseParams dense;
  dense.is_rk4 = method == Discretization::kRk4;
  dense.repeats_first = in.repeats_first;
  switch (method) {
    case Discretization::kEuler:
    case Discretization::kRk4:
      break;
    case Discretization::kBackwardEuler:
      dense.alpha = 1;
      break;
    default:
      dense.alpha = two.method.alpha;
  }
  if (is_two_sample(method)) dense.current = dense.alpha, dense.previous = 1 - dense.alpha;
  dense.previous_u = two.previous_u;
  dense.previous_B = two.previous_B;
  dense.matrices = schur.size(1);
  dense.stride = schur.size(2);
  dense.T = schur.select(0, 0).const_data_ptr();
  dense.Q = schur.select(0, 1).const_data_ptr();
  if (schur.size(0) == 4) {
    dense.T_columns = schur.select(0, 2).const_data_ptr();
    dense.Q_columns = schur.select(0, 3).const_data_ptr();
  }

  DenseTiles& tiles = dense.tiles;
  const auto group = [&](const MatrixView& matrix) { return matrix.per_step ? scan.dim / matrix.groups : scan.dim; };
  tiles.segment = std::gcd(group(scan.B), group(scan.C));
  tiles.channels = std::min(channels, std::max<int64_t>(1, tiles.segment));
  tiles.per_segment = tiles.segment == 0 ? 0 : ceil_div(tiles.segment, tiles.channels);
  tiles.tiles = tiles.segment == 0 ? 0 : scan.dim / tiles.segment * tiles.per_segment;
  tiles.slots = std::min(scan.rows, slots);
  return dense;
}

DenseBwd::DenseBwd(const DenseBwdInputs& bwd) : two(two_sample_inputs(bwd)) {}

SelectiveScanBwdParams DenseBwd::make_params(Discretization method, const PackedRows& rows,
                                             const at::Tensor& chunk_states) const {
  GradTensors grads = two.of_scan();
  for (const int made : {kGradA, kGradB, kGradC, kGradD, kGradDeltaBias})
    grads[made] = empty_tensor({0}, grads[made].options());
  return make_bwd_params(two.scan, method, rows, chunk_states, grads);
}

DenseSums DenseBwd::allocate_sums(const DenseInputs& in, const SelectiveScanParams& scan, const DenseParams& dense) {
  const GradTensors grads = two.of_scan();
  const at::TensorOptions options = in.A.options();
  const int64_t slots = dense.tiles.slots, dim = scan.dim, dstate = scan.dstate;
  const auto allocate = [&](at::Tensor& sums, bool is_needed, at::IntArrayRef shape) -> void* {
    if (!is_needed) return nullptr;
    sums = at::zeros(shape, options);
    return sums.mutable_data_ptr();
  };
  const auto is_needed = [&](Grad grad) { return grads[grad].numel() > 0; };
  DenseSums sums;
  sums.A = allocate(A_, is_needed(kGradA), {slots, dim, dstate, dstate});
  sums.constant_B = allocate(constant_B_, is_needed(kGradB) && !scan.B.per_step, {slots, dim, dstate});
  sums.constant_C = allocate(constant_C_, is_needed(kGradC) && !scan.C.per_step, {slots, dim, dstate});
  sums.D = allocate(D_, is_needed(kGradD), {slots, dim});
  sums.delta_bias = allocate(delta_bias_, is_needed(kGradDeltaBias), {slots, dim});
  if (two.grad_previous.numel() > 0) sums.grad_previous = two.grad_previous.mutable_data_ptr();

  const auto parts = [&](at::Tensor& tensor, Grad grad, const MatrixView& matrix, MatrixView& view, int64_t& stride) {
    if (!is_needed(grad) || !matrix.per_step) return;
    const int64_t tiles = dense.tiles.tiles / matrix.groups;
    tensor = empty_tensor({tiles, scan.batch, matrix.groups, dstate, scan.seqlen}, options);
    if (tiles == 0) return;  // without channels
    view = matrix_view(tensor.select(0, 0), Access::kWrite, in.reverse);
    stride = tensor.stride(0);
  };
  parts(parts_B_, kGradB, scan.B, sums.B, sums.stride_tile_B);
  parts(parts_C_, kGradC, scan.C, sums.C, sums.stride_tile_C);
  return sums;
}

DenseGrads DenseBwd::grads() const {
  DenseGrads grads;
  std::copy_n(two.grads.begin(), kNumGrads, grads.begin());
  for (int i = 0; i < 2; ++i) grads[kNumGrads + i] = two.grads[kPreviousPlaces[i]];
  return grads;
}

DenseGrads DenseBwd::finish(const DenseInputs& in, const at::Tensor& schur) && {
  const auto sum = [&](Grad grad, const at::Tensor& parts) {
    if (parts.defined()) two.grads[grad].copy_(parts.sum(0).view_as(two.grads[grad]));
  };
  if (A_.defined()) {
    // In double, so that no setting of fp32 products applies.
    at::Tensor X = A_.sum(0);
    if (in.A.size(0) == 1) X = X.sum(0, /*keepdim=*/true);
    const int64_t dstate = in.A.size(1);
    const at::Tensor Q = schur.select(0, 1).narrow(1, 0, dstate).narrow(2, 0, dstate).to(at::kDouble);
    two.grads[kGradA].copy_(at::matmul(at::matmul(Q, X.to(at::kDouble)), Q.mT()));
  }
  sum(kGradB, constant_B_);
  sum(kGradC, constant_C_);
  sum(kGradB, parts_B_);
  sum(kGradC, parts_C_);
  sum(kGradD, D_);
  sum(kGradDeltaBias, delta_bias_);
  two.grads = std::move(two).finish(in);
  return grads();
}

namespace {

// Saves the inputs and the states at the chunk boundaries, and the initial state of a packed call.
struct SelectiveScanDense : DifferentiableOp<SelectiveScanDense, DenseBwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::selective_scan_dense";
  static constexpr char kBackward[] = "ssm_kernels::_selective_scan_dense_bwd";
  static constexpr bool kIsPublic = true;

  static const char* name(const DenseInputs&) { return kDenseOp; }
  static Discretization check(const DenseInputs& in) { return check_dense_inputs(in); }

  static auto differentiable(Inputs& in) { return in.tensors(); }

  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<FwdOutputs, DenseFwdInputs> op("ssm_kernels::_selective_scan_dense_fwd");
    in.save_chunk_states = saved != nullptr;
    in.has_initial_state = is_present(in.initial_state);
    if (saved != nullptr && in.is_packed()) in.packed_initial_state = in.initial_state;
    FwdOutputs outputs = op(FwdCall(in));
    if (saved != nullptr) saved->push_back(std::move(outputs.chunk_states));
    return {std::move(outputs.out), std::move(outputs.last_state)};
  }

  static auto saved_fields(Inputs& in) {
    return std::tuple_cat(in.fields_but_state(),
                          std::tie(in.packed_initial_state, in.previous_u, in.previous_B, in.seq_idx, in.cu_seqlens),
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
    to.to_lower(in.u, in.delta, in.z, in.previous_u, in.previous_B);
    to.to_float(in.A, in.D, in.delta_bias, in.initial_state);
    for (at::Tensor* matrix : {&in.B, &in.C}) matrix->dim() == 2 ? to.to_float(*matrix) : to.to_lower(*matrix);
  }

 private:
  struct FwdCall : DenseFwdInputs {
    explicit FwdCall(const DenseInputs& in) { static_cast<DenseInputs&>(*this) = in; }
  };
};

struct DenseStatesAt : SampleStatesAt<SelectiveScanDense> {
  static constexpr char kSchema[] = "ssm_kernels::_selective_scan_dense_states_at";
};

FwdOutputs meta_dense_fwd(const DenseFwdInputs& in) {
  check_dense_inputs(in);
  return allocate_fwd(in);
}

DenseGrads meta_dense_bwd(const DenseBwdInputs& bwd) {
  check_dense_inputs(bwd.in);
  return DenseBwd(bwd).grads();
}

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(SelectiveScanDense)
SSM_AUTOCAST_OPERATOR(DenseStatesAt)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { implement<&DenseStatesAt::call>(m, DenseStatesAt::kSchema); }

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { register_dense_kernels<&meta_dense_fwd, &meta_dense_bwd>(m); }

}  // namespace ssm_kernels::selective_scan
