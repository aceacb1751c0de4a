// mamba3_state_update on every device: checks, conversion to plain data, Meta, Autograd and Autocast; and the step as operators
// of PyTorch, which CUDA runs for float64.

#include "mamba3/mamba3_step_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "common/limits.h"
#include "mamba3/mamba3_op.h"
#include "ssd/ssd_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/chunk_runs.h"
#include "torch/memory_overlap.h"
#include "torch/schemas.h"
#include "torch/slot_indices.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::mamba3::step {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // A step of mamba3_chunk_scan, the four states updated in place.
  schemas.in_place(
      "mamba3_state_update(Tensor(a!) angle, Tensor(b!) ssm, Tensor(c!) previous_k, Tensor(d!) previous_x, Tensor x, "
      "Tensor dt, Tensor A, Tensor B, Tensor C, Tensor trap, Tensor angles, Tensor? B_bias=None, Tensor? C_bias=None, "
      "Tensor? D=None, Tensor? z=None, Tensor? mimo_x=None, Tensor? mimo_z=None, Tensor? mimo_out=None, "
      "Tensor? norm_weight=None, float norm_eps=1e-05, str rotate='pairs', Tensor? state_batch_indices=None) -> Tensor");
}

namespace {

constexpr char kStep[] = "mamba3_state_update", kStepScan[] = "mamba3_chunk_scan";
constexpr char kStepMatrix[] = "(batch, groups, dstate)", kStepRanks[] = "(batch, ranks, groups, dstate)";

// The biases and what only calls with ranks have.
void check_step_ranks(const ArgumentChecks& checks, const Inputs& in) {
  const at::ScalarType accumulate = checks.accumulate();
  const c10::SymInt heads = in.x.sym_size(1), headdim = in.x.sym_size(2), dstate = in.B.sym_size(-1);
  const auto check_bias = [&](const char* name, const OptionalTensor& bias) {
    if (is_present(bias) && in.has_ranks() && bias->dim() == 3) {
      checks.tensor(name, bias, "(heads, ranks, dstate)", {heads, in.B.sym_size(1), dstate}, accumulate);
    } else {
      checks.tensor(name, bias, in.has_ranks() ? "(heads, dstate) or (heads, ranks, dstate)" : "(heads, dstate)",
                    {heads, dstate}, accumulate);
    }
  };
  check_bias("B_bias", in.B_bias);
  check_bias("C_bias", in.C_bias);
  for (const auto& [name, factor] :
       {std::pair<const char*, const OptionalTensor&>("mimo_x", in.mimo_x), {"mimo_z", in.mimo_z}, {"mimo_out", in.mimo_out}}) {
    if (!is_present(factor)) continue;
    TORCH_CHECK_VALUE(in.has_ranks(), kStep, ": expected ", name, " with B and C of shape ", kStepRanks,
                      " only, got it with B of shape ", in.B.sym_sizes());
    checks.tensor(name, factor, "(heads, ranks, headdim)", {heads, in.B.sym_size(1), headdim}, accumulate);
  }
  TORCH_CHECK_VALUE(is_present(in.z) || !is_present(in.mimo_z), kStep, ": expected mimo_z with z only, got it without z");
}

}  // namespace

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kStep, "x", in.x);
  checks.rank("x", in.x, 3, "(batch, heads, headdim)");
  const bool has_ranks = in.has_ranks();
  if (!has_ranks) checks.rank("B", in.B, 3, "(batch, groups, dstate) or (batch, ranks, groups, dstate)");
  const c10::SymInt batch = in.x.sym_size(0), heads = in.x.sym_size(1), headdim = in.x.sym_size(2);
  const c10::SymInt groups = in.B.sym_size(-2), dstate = in.B.sym_size(-1);
  TORCH_CHECK_VALUE(!has_ranks || in.B.sym_size(1) >= 1, kStep, ": expected at least one rank in B and C, got ",
                    in.B.sym_sizes());
  const at::ScalarType dtype = in.x.scalar_type(), accumulate = checks.accumulate();
  TORCH_CHECK_VALUE(headdim >= 1 && headdim <= ssd::kMaxHeaddim, kStep, ": expected headdim from 1 to ", ssd::kMaxHeaddim,
                    ", got ", headdim);
  for (const auto& [name, tensor] : {std::pair<const char*, const at::Tensor&>("dt", in.dt), {"A", in.A}, {"trap", in.trap}}) {
    checks.parameter(name, tensor, "(batch, heads)", {batch, heads});
  }
  std::vector<c10::SymInt> shape = {batch, groups, dstate};
  if (has_ranks) shape.insert(shape.begin() + 1, in.B.sym_size(1));
  checks.tensor("B", in.B, has_ranks ? kStepRanks : kStepMatrix, shape, dtype);
  TORCH_CHECK_VALUE(groups > 0 && heads % groups == 0, kStep, ": expected the groups of B and C to divide heads = ", heads,
                    ", got ", groups);
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, kStep, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  checks.tensor("C", in.C, has_ranks ? kStepRanks : kStepMatrix, in.B.sym_sizes(), dtype);
  const int64_t rank = in.angles.dim();
  checks.rank("angles", in.angles, rank == 3 ? 3 : 2, "(batch, angles) or (batch, heads, angles)");
  const c10::SymInt angles = in.angles.sym_size(-1);
  if (rank == 2) {
    checks.parameter("angles", in.angles, "(batch, angles)", {batch, angles});
  } else {
    checks.parameter("angles", in.angles, "(batch, heads, angles)", {batch, heads, angles});
  }
  check_rotation(kStep, in.rotate, angles, dstate);
  check_norm_eps(kStep, in.norm_eps);
  check_step_ranks(checks, in);
  if (is_present(in.D)) {
    if (in.D->dim() == 2) {
      checks.tensor("D", in.D, "(heads, headdim)", {heads, headdim}, accumulate);
    } else {
      checks.tensor("D", in.D, "(heads,) or (heads, headdim)", {heads}, accumulate);
    }
  }
  checks.tensor("z", in.z, "(batch, heads, headdim)", in.x.sym_sizes(), dtype);
  checks.tensor("norm_weight", in.norm_weight, "(heads, headdim)", {heads, headdim}, accumulate);
  checks.indices("state_batch_indices", in.state_batch_indices, "(batch,)", {batch});
  checks.rank("ssm", in.ssm, 4, "(batch, heads, headdim, dstate)");
  const c10::SymInt slots = is_present(in.state_batch_indices) ? in.ssm.sym_size(0) : batch;
  checks.parameter("ssm", in.ssm, "(batch, heads, headdim, dstate)", {slots, heads, headdim, dstate});
  if (in.angle.scalar_type() == at::kDouble) {
    checks.tensor("angle", in.angle, "(batch, heads, angles)", {slots, heads, angles}, at::kDouble);
  } else {
    checks.tensor("angle", in.angle, "(batch, heads, angles)", {slots, heads, angles}, accumulate);
  }
  if (has_ranks) {
    checks.tensor("previous_k", in.previous_k, "(batch, heads, ranks, dstate)", {slots, heads, in.B.sym_size(1), dstate},
                  accumulate);
  } else {
    checks.tensor("previous_k", in.previous_k, "(batch, heads, dstate)", {slots, heads, dstate}, accumulate);
  }
  checks.tensor("previous_x", in.previous_x, "(batch, heads, headdim)", {slots, heads, headdim}, dtype);
}

at::Tensor allocate_out(const Inputs& in) { return empty_tensor(in.x.sym_sizes(), in.x.options()); }

void check_memory(const Inputs& in) {
  const std::vector<NamedTensor> states = {
      {"angle", in.angle}, {"ssm", in.ssm}, {"previous_k", in.previous_k}, {"previous_x", in.previous_x}};
  const std::vector<NamedTensor> read = {{"x", in.x},
                                         {"dt", in.dt},
                                         {"A", in.A},
                                         {"B", in.B},
                                         {"C", in.C},
                                         {"trap", in.trap},
                                         {"angles", in.angles},
                                         {"B_bias", in.B_bias},
                                         {"C_bias", in.C_bias},
                                         {"D", in.D},
                                         {"z", in.z},
                                         {"mimo_x", in.mimo_x},
                                         {"mimo_z", in.mimo_z},
                                         {"mimo_out", in.mimo_out},
                                         {"norm_weight", in.norm_weight},
                                         {"state_batch_indices", in.state_batch_indices}};
  for (size_t i = 0; i < states.size(); ++i) {
    check_in_place(kStep, states[i].name, *states[i].tensor, read);
    check_in_place(kStep, states[i].name, *states[i].tensor, at::ArrayRef<NamedTensor>(states).slice(i + 1));
  }
}

namespace {

// Zero for an axis of size 1, whose stride is arbitrary.
int64_t step_stride(const at::Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

// Views a tensor, (rows, heads), (rows, heads, columns) or (rows, ranks, groups, columns), or without `has_rows` a parameter,
// (heads,), (heads, columns) or (heads, ranks, columns).
TokenView step_view(const OptionalTensor& tensor, at::ScalarType input, Access access = Access::kRead, bool has_rows = true) {
  TokenView view;
  if (!is_present(tensor)) return view;
  view.data = data_of(*tensor, access);
  view.is_input_kind = tensor->scalar_type() == input;
  if (has_rows) view.stride_row = step_stride(*tensor, 0);
  const bool has_ranks = tensor->dim() == 3 + has_rows;
  view.stride_head = step_stride(*tensor, has_ranks && has_rows ? 2 : has_rows);
  if (has_ranks) view.stride_rank = step_stride(*tensor, 1);
  if (tensor->dim() >= 2 + has_rows) view.stride_column = step_stride(*tensor, -1);
  return view;
}

StateView step_state(const at::Tensor& tensor) {
  StateView view;
  view.data = tensor.mutable_data_ptr();
  view.kind = scalar_kind(tensor.scalar_type());
  view.stride_slot = step_stride(tensor, 0);
  view.stride_head = step_stride(tensor, 1);
  if (tensor.dim() == 4) view.stride_row = step_stride(tensor, 2);
  view.stride_column = tensor.size(-1) == 1 ? 1 : tensor.stride(-1);
  return view;
}

}  // namespace

StepParams make_params(const Inputs& in, const at::Tensor& out) {
  const at::ScalarType dtype = in.x.scalar_type();
  StepParams params;
  params.rows = in.x.size(0);
  params.slots = in.ssm.size(0);
  params.heads = in.x.size(1);
  params.ranks = in.has_ranks() ? in.B.size(1) : 1;
  params.groups = in.B.size(-2);
  params.headdim = in.x.size(2);
  params.dstate = in.B.size(-1);
  params.angles = in.angles.size(-1);
  params.input_kind = scalar_kind(dtype);
  params.is_pairs = in.rotate == "pairs";
  params.norm_eps = in.norm_eps;
  params.x = step_view(in.x, dtype);
  params.dt = step_view(in.dt, dtype);
  params.A = step_view(in.A, dtype);
  params.B = step_view(in.B, dtype);
  params.C = step_view(in.C, dtype);
  params.trap = step_view(in.trap, dtype);
  params.rates = step_view(in.angles, dtype);
  if (in.angles.dim() == 2) {  // shared by the heads
    params.rates.stride_column = std::exchange(params.rates.stride_head, 0);
  }
  params.B_bias = step_view(in.B_bias, dtype, Access::kRead, /*has_rows=*/false);
  params.C_bias = step_view(in.C_bias, dtype, Access::kRead, /*has_rows=*/false);
  params.D = step_view(in.D, dtype, Access::kRead, /*has_rows=*/false);
  params.z = step_view(in.z, dtype);
  params.mimo_x = step_view(in.mimo_x, dtype, Access::kRead, /*has_rows=*/false);
  params.mimo_z = step_view(in.mimo_z, dtype, Access::kRead, /*has_rows=*/false);
  params.mimo_out = step_view(in.mimo_out, dtype, Access::kRead, /*has_rows=*/false);
  params.norm_weight = step_view(in.norm_weight, dtype, Access::kRead, /*has_rows=*/false);
  params.out = step_view(out, dtype, Access::kWrite);
  params.angle = step_state(in.angle);
  params.ssm = step_state(in.ssm);
  params.k = step_state(in.previous_k);
  params.previous_x = step_state(in.previous_x);
  params.slot_of_row = index_table(in.state_batch_indices);
  return params;
}

namespace {

struct Mamba3StateUpdate : InPlaceOp<Inputs> {
  static constexpr char kSchema[] = "ssm_kernels::mamba3_state_update";
  static constexpr const char *kName = kStep, *kScan = kStepScan;
  static constexpr size_t kStates = 4;

  static auto tensors(const Inputs& in) {
    return std::tie(in.angle, in.ssm, in.previous_k, in.previous_x, in.x, in.dt, in.A, in.B, in.C, in.trap, in.angles,
                    in.B_bias, in.C_bias, in.D, in.z, in.mimo_x, in.mimo_z, in.mimo_out, in.norm_weight);
  }

  static void count_writes(const Inputs& in) {
    for (const at::Tensor& state : {in.angle, in.ssm, in.previous_k, in.previous_x}) {
      torch::autograd::increment_version(state);
    }
  }

  // Tokens in the dtype of previous_x, gates and parameters in float32. The states are written to and are not cast.
  static void cast(Inputs& in, const Autocast& to) {
    to.to(in.previous_x.scalar_type(), in.x, in.B, in.C, in.z);
    to.to_float(in.dt, in.A, in.trap, in.angles, in.B_bias, in.C_bias, in.D, in.mimo_x, in.mimo_z, in.mimo_out, in.norm_weight);
  }

  static at::Tensor meta(const Inputs& in) {
    check_inputs(in);
    return allocate_out(in);
  }
};

}  // namespace

SSM_IN_PLACE_OPERATOR(Mamba3StateUpdate)

namespace {

// The rows of a batch in the pool of states, without a wait of the host. A slot beyond the pool is padding too, so that no
// memory outside it is touched.
class Slots {
 public:
  explicit Slots(const Inputs& in) : is_given_(is_present(in.state_batch_indices)) {
    if (!is_given_) return;
    const at::Tensor index = in.state_batch_indices->to(at::kLong);
    is_used_ = index.ge(0).logical_and_(index.lt(in.ssm.size(0)));
    // A padded row repeats the first row that has a slot: all writers of that slot write the same.
    const at::Tensor first = is_used_.to(at::kLong).argmax(0);
    source_ = at::where(is_used_, at::arange(index.size(0), index.options()), first);
    slot_ = at::where(is_used_, index, 0).index_select(0, source_);
  }

  at::Tensor read(const at::Tensor& pool) const { return is_given_ ? pool.index_select(0, slot_) : pool; }

  void write(at::Tensor pool, const at::Tensor& rows) const {
    if (!is_given_) {
      pool.copy_(rows);
      return;
    }
    // Where all rows are padding, the first slot keeps its state.
    pool.index_copy_(0, slot_, at::where(is_used_.any(), rows.to(pool.scalar_type()).index_select(0, source_), read(pool)));
  }

  at::Tensor without_padding(const at::Tensor& out) const {
    return is_given_ ? out.masked_fill(is_used_.logical_not().view({-1, 1, 1}), 0) : out;
  }

 private:
  bool is_given_;
  at::Tensor is_used_, source_, slot_;
};

// The ranks of a step: sums of outer products and products with the state, of rows (batch, ranks, heads, ...) or, in a call
// without ranks, (batch, heads, ...).
struct StepRanks {
  const Inputs& in;

  at::Tensor outer(const at::Tensor& v, const at::Tensor& k) const {  // (batch, heads, headdim, dstate)
    if (!in.has_ranks()) return v.unsqueeze(-1) * k.unsqueeze(-2);
    return at::matmul(v.permute({0, 2, 3, 1}), k.transpose(1, 2));
  }
  at::Tensor read(const at::Tensor& S, const at::Tensor& q) const {
    if (!in.has_ranks()) return (S * q.unsqueeze(-2)).sum(-1);
    return at::matmul(q.transpose(1, 2), S.transpose(-2, -1)).transpose(1, 2);
  }
  // (batch, heads, headdim) or (heads, headdim), times a factor of each rank.
  at::Tensor times(const at::Tensor& tensor, const OptionalTensor& factor) const {
    if (!in.has_ranks()) return tensor;
    if (is_present(factor)) return tensor.unsqueeze(1) * factor->transpose(0, 1);
    return tensor.unsqueeze(1).expand({-1, in.B.size(1), -1, -1});
  }
  at::Tensor sum(const at::Tensor& outputs) const {
    if (!in.has_ranks()) return outputs;
    return (is_present(in.mimo_out) ? outputs * in.mimo_out->transpose(0, 1) : outputs).sum(1);
  }
  // k as the state has it, (batch, heads, ranks, dstate), and back.
  at::Tensor exchanged(const at::Tensor& k) const { return in.has_ranks() ? k.transpose(1, 2) : k; }
  // Phases, (batch, heads, angles), in a shape that broadcasts over the ranks of rows.
  at::Tensor of_rows(const at::Tensor& phases) const { return in.has_ranks() ? phases.unsqueeze(1) : phases; }
  at::Tensor bias(const at::Tensor& bias) const { return bias.dim() == 3 ? bias.transpose(0, 1) : bias; }
};

}  // namespace

at::Tensor step_aten(const Inputs& in) {
  check_inputs(in);
  check_memory(in);
  // Without slots all rows are padding.
  if (in.x.size(0) == 0 || in.ssm.size(0) == 0) return allocate_out(in).zero_();
  const ExactProducts exact;
  const Slots slots(in);
  const StepRanks ranks{in};
  const at::ScalarType wide = accumulate_type(in.x.scalar_type());
  const int64_t heads = in.x.size(1), count = in.angles.size(-1), dstate = in.B.size(-1);
  const bool is_pairs = in.rotate == "pairs";
  const at::Tensor dt = in.dt.to(at::kDouble), weight = in.trap.to(at::kDouble).sigmoid();
  const at::Tensor decay = (in.A.to(at::kDouble) * dt).exp();
  const at::Tensor rates = in.angles.to(at::kDouble).tanh();
  const at::Tensor added = (in.angles.dim() == 2 ? rates.unsqueeze(1) : rates) * dt.unsqueeze(-1) * 0.5;
  at::Tensor turns = slots.read(in.angle).to(at::kDouble) / (2 * kPi) + added;
  turns = turns - turns.round();
  const at::Tensor radians = turns * (2 * kPi);
  const at::Tensor cos = ranks.of_rows(radians.cos().to(wide)), sin = ranks.of_rows(radians.sin().to(wide));
  const auto rotated = [&](const at::Tensor& tensor, const OptionalTensor& bias) {
    const at::Tensor of_heads = tensor.to(wide).repeat_interleave(heads / in.B.size(-2), -2);
    const at::Tensor rows = is_present(bias) ? of_heads + ranks.bias(*bias) : of_heads.clone();
    const at::Tensor pairs = is_pairs ? rows.narrow(-1, 0, 2 * count).unflatten(-1, {count, 2}) : rows;
    const at::Tensor first = is_pairs ? pairs.select(-1, 0) : rows.narrow(-1, 0, count);
    const at::Tensor second = is_pairs ? pairs.select(-1, 1) : rows.narrow(-1, dstate / 2, count);
    const at::Tensor turned = cos * first - sin * second;
    at::Tensor(second).copy_(sin * first + cos * second);
    at::Tensor(first).copy_(turned);
    return rows;
  };
  const at::Tensor k = rotated(in.B, in.B_bias), q = rotated(in.C, in.C_bias), v = ranks.times(in.x.to(wide), in.mimo_x);
  const auto of_matrix = [&](const at::Tensor& gate) { return gate.to(wide).unsqueeze(-1).unsqueeze(-1); };
  const at::Tensor before =
      ranks.outer(ranks.times(slots.read(in.previous_x).to(wide), in.mimo_x), ranks.exchanged(slots.read(in.previous_k)));
  const at::Tensor S = of_matrix(decay) * slots.read(in.ssm).to(wide) + of_matrix((1 - weight) * dt * decay) * before +
                       of_matrix(weight * dt) * ranks.outer(v, k);
  at::Tensor y = ranks.read(S, q);
  if (is_present(in.D)) y = y + (in.D->dim() == 2 ? *in.D : in.D->unsqueeze(-1)) * v;
  if (is_present(in.norm_weight)) y = y * (y.square().mean(-1, /*keepdim=*/true) + in.norm_eps).rsqrt() * *in.norm_weight;
  if (is_present(in.z)) y = y * at::silu(ranks.times(in.z->to(wide), in.mimo_z));
  y = ranks.sum(y);
  slots.write(in.angle, radians);
  slots.write(in.ssm, S);
  slots.write(in.previous_k, ranks.exchanged(k));
  slots.write(in.previous_x, in.x);
  return slots.without_padding(y.to(in.x.scalar_type()));
}

}  // namespace ssm_kernels::mamba3::step
