// mlstm_step on every device: checks, conversion to plain data, Meta, Autograd and Autocast.

#include "mlstm/mlstm_step_op.h"

#include <torch/library.h>

#include <cmath>

#include "mlstm/mlstm_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/memory_overlap.h"
#include "torch/schemas.h"
#include "torch/slot_indices.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::mlstm::step {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // A step of mlstm_scan, the states updated in place.
  schemas.in_place(
      "mlstm_step(Tensor(a!) C, Tensor(b!) n, Tensor(c!) m, Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "
      "float? scale=None, float eps=1e-06, str input_gate='exp', bool normalize=True, Tensor? state_batch_indices=None) "
      "-> Tensor");
}

namespace {

constexpr char kOp[] = "mlstm_step", kScan[] = "mlstm_scan";

}  // namespace

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "q", in.q);
  checks.rank("q", in.q, 3, "(batch, heads, key_dim)");
  checks.rank("C", in.C, 4, "(batch, heads, value_dim, key_dim)");
  mlstm::check_options(kOp, in.scale, in.eps, in.input_gate, in.normalize);
  const c10::SymInt rows = in.q.sym_size(0), heads = in.q.sym_size(1), key_dim = in.q.sym_size(2);
  const c10::SymInt slots = is_present(in.state_batch_indices) ? in.C.sym_size(0) : rows, value_dim = in.C.sym_size(2);
  const at::ScalarType dtype = in.q.scalar_type(), accumulate = checks.accumulate();
  TORCH_CHECK_VALUE(key_dim >= 1 && key_dim <= kMaxKeyDim, kOp, ": expected key_dim from 1 to ", kMaxKeyDim, ", got ", key_dim);
  checks.parameter("C", in.C, "(batch, heads, value_dim, key_dim)", {slots, heads, value_dim, key_dim});
  checks.tensor("n", in.n, "(batch, heads, key_dim)", {slots, heads, key_dim}, accumulate);
  checks.tensor("m", in.m, "(batch, heads)", {slots, heads}, accumulate);
  checks.tensor("k", in.k, "(batch, heads, key_dim)", in.q.sym_sizes(), dtype);
  checks.tensor("v", in.v, "(batch, heads, value_dim)", {rows, heads, value_dim}, dtype);
  checks.parameter("i", in.i, "(batch, heads)", {rows, heads});
  checks.parameter("f", in.f, "(batch, heads)", {rows, heads});
  checks.indices("state_batch_indices", in.state_batch_indices, "(batch,)", {rows});
}

at::Tensor allocate_out(const Inputs& in) {
  return empty_tensor({in.q.sym_size(0), in.q.sym_size(1), in.C.sym_size(2)}, in.q.options());
}

namespace {

// Zero for an axis of size 1, whose stride is arbitrary and may be unaligned.
int64_t stride_of(const at::Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

TokenView token_view(const at::Tensor& tensor, Access access, at::ScalarType input) {
  return {data_of(tensor, access), stride_of(tensor, 0), stride_of(tensor, 1), tensor.dim() == 3 ? stride_of(tensor, 2) : 0,
          tensor.scalar_type() == input};
}

StateView state_view(const at::Tensor& tensor) {
  StateView view{tensor.mutable_data_ptr(), stride_of(tensor, 0), stride_of(tensor, 1)};
  if (tensor.dim() == 4) view.stride_row = stride_of(tensor, 2);
  if (tensor.dim() >= 3) view.stride_column = stride_of(tensor, -1);
  return view;
}

}  // namespace

StepParams make_params(const Inputs& in, const at::Tensor& out) {
  const auto check_written = [&](const char* name, const at::Tensor& written, std::initializer_list<NamedTensor> states) {
    check_in_place(
        kOp, name, written,
        {{"q", in.q}, {"k", in.k}, {"v", in.v}, {"i", in.i}, {"f", in.f}, {"state_batch_indices", in.state_batch_indices}});
    check_in_place(kOp, name, written, states);
  };
  check_written("C", in.C, {{"n", in.n}, {"m", in.m}});
  check_written("n", in.n, {{"m", in.m}});
  check_written("m", in.m, {});
  const at::ScalarType dtype = in.q.scalar_type();
  StepParams params;
  params.rows = in.q.size(0);
  params.slots = in.C.size(0);
  params.heads = in.q.size(1);
  params.key_dim = in.q.size(2);
  params.value_dim = in.C.size(2);
  params.input_kind = scalar_kind(dtype);
  params.state_kind = scalar_kind(in.C.scalar_type());
  params.is_exp = mlstm::parse_input_gate(kOp, in.input_gate) == mlstm::InputGate::kExp;
  params.normalize = in.normalize;
  params.scale = in.scale.value_or(1 / std::sqrt(static_cast<double>(params.key_dim)));
  params.eps = in.eps;
  params.q = token_view(in.q, Access::kRead, dtype);
  params.k = token_view(in.k, Access::kRead, dtype);
  params.v = token_view(in.v, Access::kRead, dtype);
  params.i = token_view(in.i, Access::kRead, dtype);
  params.f = token_view(in.f, Access::kRead, dtype);
  params.out = token_view(out, Access::kWrite, dtype);
  params.C = state_view(in.C);
  params.n = state_view(in.n);
  params.m = state_view(in.m);
  if (is_present(in.state_batch_indices)) {
    const at::Tensor& indices = *in.state_batch_indices;
    params.slot_of_row = {indices.const_data_ptr(), indices.scalar_type() == at::kLong, 1, indices.stride(0), 0};
  }
  return params;
}

namespace {

struct MlstmStep : InPlaceOp<Inputs> {
  static constexpr char kSchema[] = "ssm_kernels::mlstm_step";
  static constexpr const char *kName = kOp, *kScan = step::kScan;
  static constexpr size_t kStates = 3;

  static auto tensors(const Inputs& in) { return std::tie(in.C, in.n, in.m, in.q, in.k, in.v, in.i, in.f); }

  static void count_writes(const Inputs& in) {
    torch::autograd::increment_version(in.C);
    if (in.normalize) torch::autograd::increment_version(in.n);
    torch::autograd::increment_version(in.m);
  }

  // Inputs in the autocast dtype, gates in float32. The states are written to and are not cast.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.q, in.k, in.v);
    to.to_float(in.i, in.f);
  }

  static at::Tensor meta(const Inputs& in) {
    check_inputs(in);
    return allocate_out(in);
  }
};

}  // namespace

SSM_IN_PLACE_OPERATOR(MlstmStep)

}  // namespace ssm_kernels::mlstm::step
