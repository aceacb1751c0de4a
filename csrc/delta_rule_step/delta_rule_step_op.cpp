// delta_rule_step on every device: checks, conversion to plain data, Meta, Autograd and Autocast.

#include "delta_rule_step/delta_rule_step_op.h"

#include <torch/library.h>

#include <array>
#include <cmath>
#include <optional>

#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/decoding_op.h"
#include "torch/memory_overlap.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::delta_rule_step {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // Steps of the delta rule's scan, the states updated in place.
  schemas.in_place(
      "delta_rule_step(Tensor(a!) states, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g=None, float? scale=None, "
      "Tensor? state_batch_indices=None, bool qk_l2norm=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "float? gate_lower_bound=None, bool beta_sigmoid=False, bool allow_neg_eigval=False, int num_householder=1) -> Tensor");
  // The same for servers: into `out`, slots to read from and slots to write to, packed tokens, states after each token.
  schemas.in_place(
      "delta_rule_step_out(Tensor(a!) states, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, float? scale, "
      "Tensor? state_batch_indices, bool qk_l2norm, Tensor? A_log, Tensor? dt_bias, float? gate_lower_bound, "
      "bool beta_sigmoid, bool allow_neg_eigval, int num_householder, Tensor(b!) out, Tensor? dst_state_batch_indices=None, "
      "int? pad_slot_id=None, Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None, "
      "Tensor(c!)? intermediate_states_buffer=None, Tensor? intermediate_state_indices=None, "
      "bool disable_state_update=False) -> ()");
}

namespace {

constexpr char kOp[] = "delta_rule_step", kScan[] = "delta_rule_scan";

// Names of the axes in messages, for the axes in front of the heads: one of rows, one more of tokens, or one of packed tokens.
struct Layout {
  int64_t leading;
  const char *keys, *values, *strengths, *head_gate, *column_gate, *out;
  // The same with several updates a token.
  const char *update_keys, *update_values, *update_strengths;
};
constexpr Layout kOneToken{1,
                           "(batch, heads, key_dim)",
                           "(batch, value_heads, value_dim)",
                           "(batch, value_heads)",
                           "(batch, value_heads)",
                           "(batch, value_heads, key_dim)",
                           "(batch, value_heads, value_dim)",
                           "(batch, num_householder, heads, key_dim)",
                           "(batch, num_householder, value_heads, value_dim)",
                           "(batch, num_householder, value_heads)"};
constexpr Layout kTokens{2,
                         "(batch, tokens, heads, key_dim)",
                         "(batch, tokens, value_heads, value_dim)",
                         "(batch, tokens, value_heads)",
                         "(batch, tokens, value_heads)",
                         "(batch, tokens, value_heads, key_dim)",
                         "(batch, tokens, value_heads, value_dim)",
                         "(batch, tokens * num_householder, heads, key_dim)",
                         "(batch, tokens * num_householder, value_heads, value_dim)",
                         "(batch, tokens * num_householder, value_heads)"};
constexpr Layout kPacked{1,
                         "(tokens, heads, key_dim)",
                         "(tokens, value_heads, value_dim)",
                         "(tokens, value_heads)",
                         "(tokens, value_heads)",
                         "(tokens, value_heads, key_dim)",
                         "(tokens, value_heads, value_dim)",
                         "(tokens * num_householder, heads, key_dim)",
                         "(tokens * num_householder, value_heads, value_dim)",
                         "(tokens * num_householder, value_heads)"};
constexpr char kStates[] = "(batch, value_heads, value_dim, key_dim)";
constexpr BufferNames kBuffer{"intermediate_states_buffer", "(entries, tokens, value_heads, value_dim, key_dim)"};

// With one token and several updates, k, v and beta have an axis that q lacks.
bool has_update_axis(const Inputs& in, bool is_packed) { return in.num_householder > 1 && in.q.dim() == 3 && !is_packed; }

bool is_raw(const Inputs& in) { return is_present(in.A_log) || in.gate_lower_bound.has_value(); }

// The leading axes of k, v and beta.
c10::SymDimVector update_axes(const Inputs& in, const Layout& layout, bool is_packed) {
  c10::SymDimVector axes(in.q.sym_sizes().slice(0, layout.leading).vec());
  if (has_update_axis(in, is_packed)) {
    axes.push_back(in.num_householder);
  } else {
    axes.back() = axes.back() * in.num_householder;
  }
  return axes;
}

c10::SymDimVector with_axes(c10::SymIntArrayRef leading, std::initializer_list<c10::SymInt> axes) {
  c10::SymDimVector shape(leading.begin(), leading.end());
  shape.append(axes.begin(), axes.end());
  return shape;
}

// `leading`: the axes of q in front of the heads.
c10::SymDimVector out_shape(const Inputs& in, int64_t leading) {
  return with_axes(in.q.sym_sizes().slice(0, leading), {in.states.sym_size(1), in.states.sym_size(2)});
}

// The checks of all arguments but those that choose slots, after that of the rank of q. `rows`: the number of states without
// slots.
void check_step(const ArgumentChecks& checks, const Inputs& in, const Layout& layout, const c10::SymInt& rows, bool is_packed) {
  const at::ScalarType dtype = in.q.scalar_type();
  const bool has_updates = in.num_householder > 1;
  const c10::SymIntArrayRef leading = in.q.sym_sizes().slice(0, layout.leading);
  const c10::SymInt key_heads = in.q.sym_size(-2), key_dim = in.q.sym_size(-1);
  checks.rank("states", in.states, 4, kStates);
  const c10::SymInt value_heads = in.states.sym_size(1), value_dim = in.states.sym_size(2);
  TORCH_CHECK_VALUE(key_dim >= 1 && key_dim <= kMaxKeyDim, kOp, ": expected key_dim from 1 to ", kMaxKeyDim, ", got ", key_dim);
  TORCH_CHECK_VALUE(key_heads > 0 && value_heads % key_heads == 0, kOp,
                    ": expected the heads of q and k to divide value_heads = ", value_heads, ", got ", key_heads);
  checks.parameter("states", in.states, kStates,
                   {is_present(in.state_batch_indices) ? in.states.sym_size(0) : rows, value_heads, value_dim, key_dim});
  TORCH_CHECK_VALUE(in.num_householder >= 1, kOp, ": expected num_householder of at least 1, got ", in.num_householder);
  const c10::SymDimVector updates = update_axes(in, layout, is_packed);
  checks.tensor("k", in.k, has_updates ? layout.update_keys : layout.keys, with_axes(updates, {key_heads, key_dim}), dtype);
  checks.tensor("v", in.v, has_updates ? layout.update_values : layout.values, with_axes(updates, {value_heads, value_dim}),
                dtype);
  checks.parameter("beta", in.beta, has_updates ? layout.update_strengths : layout.strengths,
                   with_axes(updates, {value_heads}));
  const bool has_columns = is_present(in.g) && in.g->dim() == layout.leading + 2;
  if (is_present(in.g)) {
    TORCH_CHECK_VALUE(has_columns || in.g->dim() == layout.leading + 1, kOp, ": expected g of shape ", layout.head_gate, " or ",
                      layout.column_gate, ", got ", in.g->sym_sizes());
    const c10::SymDimVector shape =
        has_columns ? with_axes(leading, {value_heads, key_dim}) : with_axes(leading, {value_heads});
    checks.parameter("g", *in.g, has_columns ? layout.column_gate : layout.head_gate, shape);
  }
  TORCH_CHECK_VALUE(is_present(in.g) || (!is_raw(in) && !is_present(in.dt_bias)), kOp,
                    ": expected g with A_log, dt_bias or gate_lower_bound, which make the log decay from it");
  TORCH_CHECK_VALUE(is_raw(in) || !is_present(in.dt_bias), kOp, ": expected A_log or gate_lower_bound with dt_bias");
  checks.parameter("A_log", in.A_log, "(value_heads,)", {value_heads});
  if (has_columns) {
    checks.parameter("dt_bias", in.dt_bias, "(value_heads, key_dim)", {value_heads, key_dim});
  } else {
    checks.parameter("dt_bias", in.dt_bias, "(value_heads,)", {value_heads});
  }
  const double bound = in.gate_lower_bound.value_or(-1), scale = in.scale.value_or(1);
  TORCH_CHECK_VALUE(bound < 0 && std::isfinite(bound), kOp, ": expected a negative and finite gate_lower_bound, got ", bound);
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": expected a finite scale, got ", scale);
}

const Layout& layout_of(const Inputs& in, bool is_packed) {
  return is_packed ? kPacked : in.q.dim() == 4 ? kTokens : kOneToken;
}

void check_rank(const ArgumentChecks& checks, const Inputs& in, const Layout& layout) {
  checks.rank("q", in.q, layout.leading + 2, layout.keys);
}

}  // namespace

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "q", in.q);
  const Layout& layout = layout_of(in, /*is_packed=*/false);
  check_rank(checks, in, layout);
  const c10::SymInt rows = in.q.sym_size(0);
  check_step(checks, in, layout, rows, /*is_packed=*/false);
  DecodingOptions options;
  options.state_batch_indices = in.state_batch_indices;
  const c10::SymInt tokens = layout.leading == 2 ? in.q.sym_size(1) : c10::SymInt(1);
  check_decoding_options(checks, options, rows, tokens, /*has_columns=*/true);
}

void check_out_inputs(const OutInputs& in) {
  const ArgumentChecks checks(kOp, "q", in.q);
  const bool is_packed = in.is_packed();
  const Layout& layout = layout_of(in, is_packed);
  check_rank(checks, in, layout);
  const c10::SymInt rows = count_rows(checks, in.cu_seqlens, in.q);
  check_step(checks, in, layout, rows, is_packed);
  std::optional<c10::SymInt> tokens;
  if (!is_packed) tokens = layout.leading == 2 ? in.q.sym_size(1) : c10::SymInt(1);
  const DecodingOptions options = in.decoding();
  check_decoding_options(checks, options, rows, tokens, /*has_columns=*/true);
  checks.tensor("out", in.out, layout.out, out_shape(in, layout.leading), in.q.scalar_type());
  check_intermediate(checks, kBuffer, options, in.states.sym_sizes().slice(1), in.states.scalar_type(), rows, tokens);
}

bool Inputs::is_plain() const { return q.dim() != 4 && (!is_present(state_batch_indices) || state_batch_indices->dim() != 2); }

at::Tensor allocate_out(const Inputs& in) { return empty_tensor(out_shape(in, in.q.dim() - 2), in.q.options()); }

namespace {

// `inner`: the axes from that of the heads on.
TokenView token_view(const at::Tensor& tensor, Access access, int64_t inner, bool is_packed) {
  const int64_t leading = tensor.dim() - inner;
  return {data_of(tensor, access), is_packed ? 0 : stride_of(tensor, 0),
          is_packed      ? stride_of(tensor, 0)
          : leading == 2 ? stride_of(tensor, 1)
                         : 0,
          stride_of(tensor, leading), inner == 2 ? stride_of(tensor, -1) : 0};
}

// `axis`: that of the value heads.
StateView state_view(const at::Tensor& tensor, int64_t axis) {
  return {tensor.mutable_data_ptr(), stride_of(tensor, 0), stride_of(tensor, axis), stride_of(tensor, axis + 1),
          stride_of(tensor, axis + 2)};
}

ParameterView parameter_view(const OptionalTensor& tensor, at::ScalarType input) {
  if (!is_present(tensor)) return {};
  return {data_of(*tensor, Access::kRead), stride_of(*tensor, 0), tensor->dim() == 2 ? stride_of(*tensor, 1) : 0,
          tensor->scalar_type() == input};
}

// All but the slots of the rows.
StepParams make_shared_params(const Inputs& in, const at::Tensor& out, int64_t rows, bool is_packed) {
  const at::ScalarType dtype = in.q.scalar_type();
  StepParams params;
  params.rows = rows;
  params.slots = in.states.size(0);
  params.key_heads = in.q.size(-2);
  params.value_heads = in.states.size(1);
  params.key_dim = in.q.size(-1);
  params.value_dim = in.states.size(2);
  params.updates = in.num_householder;
  params.input_kind = scalar_kind(dtype);
  params.state_kind = scalar_kind(in.states.scalar_type());
  params.qk_l2norm = in.qk_l2norm;
  params.beta_sigmoid = in.beta_sigmoid;
  params.allow_neg_eigval = in.allow_neg_eigval;
  params.scale = in.scale.value_or(1 / std::sqrt(static_cast<double>(params.key_dim)));
  params.has_raw_gate = is_raw(in);
  params.is_bounded = in.gate_lower_bound.has_value();
  params.gate_lower_bound = in.gate_lower_bound.value_or(0);
  params.q = token_view(in.q, Access::kRead, 2, is_packed);
  params.k = token_view(in.k, Access::kRead, 2, is_packed);
  params.v = token_view(in.v, Access::kRead, 2, is_packed);
  params.beta = token_view(in.beta, Access::kRead, 1, is_packed);
  params.beta_is_input_kind = in.beta.scalar_type() == dtype;
  params.out = token_view(out, Access::kWrite, 2, is_packed);
  if (is_present(in.g)) {
    params.has_column_gate = in.g->dim() == in.q.dim();
    params.g = token_view(*in.g, Access::kRead, params.has_column_gate ? 2 : 1, is_packed);
    params.g_is_input_kind = in.g->scalar_type() == dtype;
  }
  params.state = state_view(in.states, 1);
  params.A_log = parameter_view(in.A_log, dtype);
  params.dt_bias = parameter_view(in.dt_bias, dtype);
  return params;
}

// The arguments that a step reads.
std::array<NamedTensor, 8> read_arguments(const Inputs& in) {
  return {NamedTensor("q", in.q),
          {"k", in.k},
          {"v", in.v},
          {"beta", in.beta},
          {"g", in.g},
          {"A_log", in.A_log},
          {"dt_bias", in.dt_bias},
          {"state_batch_indices", in.state_batch_indices}};
}

}  // namespace

StepParams make_params(const Inputs& in, const at::Tensor& out) {
  check_in_place(kOp, "states", in.states, read_arguments(in));
  StepParams params = make_shared_params(in, out, in.q.size(0), /*is_packed=*/false);
  params.slot_of_row = index_table(in.state_batch_indices);
  return params;
}

StepParams make_out_params(const OutInputs& in, TokenParams& tokens) {
  const DecodingOptions options = in.decoding();
  check_writes(kOp, {{"states", in.states}, {"out", in.out}, {kBuffer.name, in.intermediate}}, read_arguments(in), options);
  const bool is_packed = in.is_packed();
  const int64_t rows = is_packed ? in.cu_seqlens->size(0) - 1 : in.q.size(0);
  StepParams params = make_shared_params(in, in.out, rows, is_packed);
  if (in.is_plain()) params.slot_of_row = index_table(in.state_batch_indices);
  tokens.rows = make_decoding_rows(options, rows, is_packed ? in.q.size(0) : in.q.dim() == 4 ? in.q.size(1) : 1);
  if (is_present(in.intermediate)) {
    tokens.intermediate = state_view(*in.intermediate, 2);
    tokens.intermediate_token = stride_of(*in.intermediate, 1);
  }
  return params;
}

namespace {

struct DeltaRuleStep : InPlaceOp<Inputs> {
  static constexpr char kSchema[] = "ssm_kernels::delta_rule_step";
  static constexpr const char *kName = kOp, *kScan = delta_rule_step::kScan;

  static auto tensors(const Inputs& in) { return std::tie(in.states, in.q, in.k, in.v, in.beta, in.g, in.A_log, in.dt_bias); }

  static void count_writes(const Inputs& in) { torch::autograd::increment_version(in.states); }

  // Inputs in the autocast dtype; gates and parameters in float32. The states are written to and are not cast.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.q, in.k, in.v);
    to.to_float(in.beta, in.g, in.A_log, in.dt_bias);
  }

  static at::Tensor meta(const Inputs& in) {
    check_inputs(in);
    return allocate_out(in);
  }
};

struct DeltaRuleStepOut : ServerOp<DeltaRuleStep> {
  static constexpr char kSchema[] = "ssm_kernels::delta_rule_step_out";

  static NoResult meta(const OutInputs& in) {
    check_out_inputs(in);
    return {};
  }
};

}  // namespace

SSM_IN_PLACE_OPERATOR(DeltaRuleStep)
SSM_IN_PLACE_OPERATOR(DeltaRuleStepOut)

}  // namespace ssm_kernels::delta_rule_step
