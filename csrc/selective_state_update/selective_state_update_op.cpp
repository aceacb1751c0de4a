// selective_state_update on every device: checks, conversion to plain data, Meta, Autograd and Autocast.

#include "selective_state_update/selective_state_update_op.h"

#include <torch/library.h>

#include <array>
#include <optional>

#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/decoding_op.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_state_update {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // One step of the scan, the state updated in place.
  schemas.in_place(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None, *, "
      "str discretization='zoh', float[]? dt_limit=None, bool A_is_log=False) -> Tensor");
  // The same for servers: into `out`, several tokens a row, slots to read from and slots to write to.
  schemas.in_place(
      "selective_state_update_out(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, str discretization, float[]? dt_limit, bool A_is_log, "
      "Tensor(b!) out, Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, Tensor? num_accepted_tokens=None, "
      "Tensor? cu_seqlens=None, Tensor(c!)? intermediate_states_buffer=None, Tensor? intermediate_state_indices=None, "
      "bool disable_state_update=False) -> ()");
}

namespace {

constexpr char kOp[] = "selective_state_update", kScan[] = "selective_scan";

constexpr char kBuffer[] = "intermediate_states_buffer";

// Sizes of the two forms, by the names that the error messages use.
struct Form {
  const char *state, *buffer, *input, *A, *parameter, *channels;
};
// The forms for the axes in front of the channels: one of rows, or another of tokens.
struct Layout {
  int64_t leading;
  Form with_channels, with_heads;
  const char *matrix, *groups;
};
constexpr Layout kOneToken{
    1,
    {"(batch, dim, dstate)", "(entries, tokens, dim, dstate)", "(batch, dim)", "(dim, dstate)", "(dim,)", "dim"},
    {"(batch, heads, headdim, dstate)", "(entries, tokens, heads, headdim, dstate)", "(batch, heads, headdim)",
     "(heads, headdim, dstate)", "(heads, headdim)", "heads"},
    "(batch, dstate)",
    "(batch, groups, dstate)"};
constexpr Layout kTokens{
    2,
    {"(batch, dim, dstate)", "(entries, tokens, dim, dstate)", "(batch, tokens, dim)", "(dim, dstate)", "(dim,)", "dim"},
    {"(batch, heads, headdim, dstate)", "(entries, tokens, heads, headdim, dstate)", "(batch, tokens, heads, headdim)",
     "(heads, headdim, dstate)", "(heads, headdim)", "heads"},
    "(batch, tokens, dstate)",
    "(batch, tokens, groups, dstate)"};
constexpr Layout kPacked{
    1,
    {"(sequences, dim, dstate)", "(entries, tokens, dim, dstate)", "(tokens, dim)", "(dim, dstate)", "(dim,)", "dim"},
    {"(sequences, heads, headdim, dstate)", "(entries, tokens, heads, headdim, dstate)", "(tokens, heads, headdim)",
     "(heads, headdim, dstate)", "(heads, headdim)", "heads"},
    "(tokens, dstate)",
    "(tokens, groups, dstate)"};

void check_input_rank(const ArgumentChecks& checks, const Inputs& in, const Layout& layout) {
  const Form& form = in.state.dim() == 4 ? layout.with_heads : layout.with_channels;
  checks.rank("x", in.x, in.state.dim() - 2 + layout.leading, form.input);
}

// The checks of all arguments but those that choose slots, after those of the ranks of state and x. `rows`: the number of
// states without them.
void check_step(const ArgumentChecks& checks, const Inputs& in, const Layout& layout, const c10::SymInt& rows) {
  const bool has_heads = in.state.dim() == 4;
  const Form& form = has_heads ? layout.with_heads : layout.with_channels;

  const at::ScalarType dtype = in.x.scalar_type();
  const c10::SymInt dstate = in.state.sym_size(-1);
  const c10::SymIntArrayRef leading = in.x.sym_sizes().slice(0, layout.leading);
  const c10::SymIntArrayRef channels = in.x.sym_sizes().slice(layout.leading);
  c10::SymDimVector channels_dstate(channels.begin(), channels.end());
  channels_dstate.push_back(dstate);
  c10::SymDimVector state_shape(channels_dstate);
  state_shape.insert(state_shape.begin(), is_present(in.state_batch_indices) ? in.state.sym_size(0) : rows);

  checks.parameter("state", in.state, form.state, state_shape);
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, kOp, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  checks.tensor("dt", in.dt, form.input, in.x.sym_sizes(), dtype);
  check_defined(kOp, "A", in.A);
  checks.parameter("A", in.A, form.A, channels_dstate);
  const int64_t groups_axis = layout.leading;
  TORCH_CHECK_VALUE(in.B.dim() == groups_axis + 1 || in.B.dim() == groups_axis + 2, kOp, ": expected B of shape ",
                    layout.matrix, " or ", layout.groups, ", got ", in.B.sym_sizes());
  c10::SymDimVector matrix_shape(leading.begin(), leading.end());
  const bool has_groups = in.B.dim() == groups_axis + 2;
  if (has_groups) matrix_shape.push_back(in.B.sym_size(groups_axis));
  matrix_shape.push_back(dstate);
  const char* const matrix = has_groups ? layout.groups : layout.matrix;
  const at::ScalarType matrix_dtype = in.is_complex ? checks.accumulate() : dtype;
  checks.tensor("B", in.B, matrix, matrix_shape, matrix_dtype);
  if (has_groups) {
    const c10::SymInt groups = in.B.sym_size(groups_axis);
    TORCH_CHECK_VALUE(groups > 0 && channels[0] % groups == 0, kOp, ": expected the groups of B and C to divide ",
                      form.channels, " = ", channels[0], ", got ", groups);
  }
  checks.tensor("C", in.C, matrix, matrix_shape, matrix_dtype);
  checks.parameter("D", in.D, form.parameter, channels);
  checks.tensor("z", in.z, form.input, in.x.sym_sizes(), dtype);
  checks.parameter("dt_bias", in.dt_bias, form.parameter, channels);
  const auto [dt_min, dt_max] = parse_dt_limit(kOp, in.dt_limit);
  check_dt_limit(kOp, dt_min, dt_max);
  parse_discretization(kOp, in.discretization, in.supports, /*lists_all=*/true);
}

void check_state_forms(const Inputs& in, const Layout& layout) {
  TORCH_CHECK_VALUE(in.state.dim() == 3 || in.state.dim() == 4, kOp, ": expected state of shape ", layout.with_channels.state,
                    " or ", layout.with_heads.state, ", got ", in.state.sym_sizes());
}

const Layout& layout_of(const OutInputs& in) {
  return in.is_packed() ? kPacked : in.x.dim() == in.state.dim() ? kTokens : kOneToken;
}

}  // namespace

void check_inputs(const Inputs& in) {
  check_defined(kOp, "state", in.state);
  check_defined(kOp, "B", in.B);
  const ArgumentChecks checks(kOp, "x", in.x);
  check_state_forms(in, kOneToken);
  if (!in.is_plain()) return check_out_inputs(OutInputs(in, /*out=*/in.x));
  check_input_rank(checks, in, kOneToken);
  check_step(checks, in, kOneToken, in.x.sym_size(0));
  checks.indices("state_batch_indices", in.state_batch_indices, "(batch,)", {in.x.sym_size(0)});
}

void check_out_inputs(const OutInputs& in) {
  check_defined(kOp, "state", in.state);
  check_defined(kOp, "B", in.B);
  const ArgumentChecks checks(kOp, "x", in.x);
  const Layout& layout = layout_of(in);
  check_state_forms(in, layout);
  const bool has_heads = in.state.dim() == 4;
  const Form& form = has_heads ? layout.with_heads : layout.with_channels;
  check_input_rank(checks, in, layout);
  const c10::SymInt rows = count_rows(checks, in.cu_seqlens, in.x);
  check_step(checks, in, layout, rows);
  std::optional<c10::SymInt> tokens;
  if (!in.is_packed()) tokens = layout.leading == 2 ? in.x.sym_size(1) : c10::SymInt(1);
  const DecodingOptions options = in.decoding();
  check_decoding_options(checks, options, rows, tokens, /*has_columns=*/true);
  checks.tensor("out", in.out, form.input, in.x.sym_sizes(), in.x.scalar_type());
  check_intermediate(checks, {kBuffer, form.buffer}, options, in.state.sym_sizes().slice(1), in.state.scalar_type(), rows,
                     tokens);
}

bool Inputs::is_plain() const {
  return x.dim() != state.dim() && (!is_present(state_batch_indices) || state_batch_indices->dim() != 2);
}

at::Tensor allocate_out(const Inputs& in) { return empty_tensor(in.x.sym_sizes(), in.x.options()); }

namespace {

// Without an axis of heads there is one head, whose stride is not used.
ChannelView batched_view(const at::Tensor& tensor, Access access, bool has_heads, bool is_packed = false) {
  return {data_of(tensor, access), is_packed ? 0 : stride_of(tensor, 0), has_heads ? stride_of(tensor, -2) : 0,
          stride_of(tensor, -1)};
}

ChannelView parameter_view(const at::Tensor& tensor) {
  return {data_of(tensor, Access::kRead), 0, tensor.dim() == 2 ? stride_of(tensor, 0) : 0, stride_of(tensor, -1)};
}

GroupView group_view(const at::Tensor& tensor, bool has_groups, bool is_packed = false) {
  return {data_of(tensor, Access::kRead), is_packed ? 0 : stride_of(tensor, 0), has_groups ? stride_of(tensor, -2) : 0,
          stride_of(tensor, -1)};
}

// All but the slots of the rows. `leading`: the axes of x, dt, z, out, B and C in front of those of the channels.
StateUpdateParams make_shared_params(const Inputs& in, const at::Tensor& out, int64_t rows, int64_t leading, bool is_packed) {
  const bool has_heads = in.state.dim() == 4, has_groups = in.B.dim() == leading + 2;
  StateUpdateParams params;
  params.batch = rows;
  params.slots = in.state.size(0);
  params.heads = has_heads ? in.x.size(-2) : 1;
  params.headdim = in.x.size(-1);
  params.groups = has_groups ? in.B.size(-2) : 1;
  params.dstate = in.state.size(-1);
  params.discretization = parse_discretization(kOp, in.discretization, in.supports);
  params.dt_softplus = in.dt_softplus;
  params.A_is_log = in.A_is_log;
  const auto [dt_min, dt_max] = parse_dt_limit(kOp, in.dt_limit);
  std::tie(params.dt_min, params.dt_max) = std::tuple_cat(kernel_dt_limit(dt_min, dt_max));
  params.input_kind = scalar_kind(in.x.scalar_type());
  params.state_kind = scalar_kind(in.state.scalar_type());

  params.state = {in.state.mutable_data_ptr(), stride_of(in.state, 0), has_heads ? stride_of(in.state, 1) : 0,
                  stride_of(in.state, -2), stride_of(in.state, -1)};
  params.A = {data_of(in.A, Access::kRead), 0, has_heads ? stride_of(in.A, 0) : 0, stride_of(in.A, -2), stride_of(in.A, -1)};
  params.A_is_input_kind = in.A.scalar_type() == in.x.scalar_type();
  params.x = batched_view(in.x, Access::kRead, has_heads, is_packed);
  params.dt = batched_view(in.dt, Access::kRead, has_heads, is_packed);
  params.out = batched_view(out, Access::kWrite, has_heads, is_packed);
  params.B = group_view(in.B, has_groups, is_packed);
  params.C = group_view(in.C, has_groups, is_packed);
  if (is_present(in.z)) params.z = batched_view(*in.z, Access::kRead, has_heads, is_packed);
  if (is_present(in.D)) {
    params.D = parameter_view(*in.D);
    params.D_is_input_kind = in.D->scalar_type() == in.x.scalar_type();
  }
  if (is_present(in.dt_bias)) {
    params.dt_bias = parameter_view(*in.dt_bias);
    params.dt_bias_is_input_kind = in.dt_bias->scalar_type() == in.x.scalar_type();
  }
  return params;
}

void set_slots(StateUpdateParams& params, const OptionalTensor& indices) {
  if (is_present(indices))
    params.indices = {indices->const_data_ptr(), indices->scalar_type() == at::kLong, indices->stride(0)};
}

}  // namespace

std::array<NamedTensor, 9> read_arguments(const Inputs& in) {
  return {NamedTensor("x", in.x),
          {"dt", in.dt},
          {"A", in.A},
          {"B", in.B},
          {"C", in.C},
          {"D", in.D},
          {"z", in.z},
          {"dt_bias", in.dt_bias},
          {"state_batch_indices", in.state_batch_indices}};
}

StateUpdateParams make_params(const Inputs& in, const at::Tensor& out) {
  check_in_place(kOp, "state", in.state, read_arguments(in));
  StateUpdateParams params = make_shared_params(in, out, in.x.size(0), /*leading=*/1, /*is_packed=*/false);
  set_slots(params, in.state_batch_indices);
  return params;
}

StateUpdateParams make_out_params(const OutInputs& in, TokenParams& tokens) {
  const DecodingOptions options = in.decoding();
  check_writes(kOp, {{"state", in.state}, {"out", in.out}, {kBuffer, in.intermediate}}, read_arguments(in), options);
  const bool is_packed = in.is_packed(), has_heads = in.state.dim() == 4;
  const int64_t leading = layout_of(in).leading, rows = is_packed ? in.cu_seqlens->size(0) - 1 : in.x.size(0);
  StateUpdateParams params = make_shared_params(in, in.out, rows, leading, is_packed);
  if (in.is_plain()) set_slots(params, in.state_batch_indices);
  tokens.rows = make_decoding_rows(options, rows, is_packed ? in.x.size(0) : leading == 2 ? in.x.size(1) : 1);
  const auto stride = [&](const at::Tensor& tensor) {
    return is_packed ? stride_of(tensor, 0) : leading == 2 ? stride_of(tensor, 1) : 0;
  };
  tokens.x = stride(in.x);
  tokens.dt = stride(in.dt);
  if (is_present(in.z)) tokens.z = stride(*in.z);
  tokens.out = stride(in.out);
  tokens.B = stride(in.B);
  tokens.C = stride(in.C);
  if (is_present(in.intermediate)) {
    const at::Tensor& buffer = *in.intermediate;
    tokens.intermediate = {buffer.mutable_data_ptr(), stride_of(buffer, 0), has_heads ? stride_of(buffer, 2) : 0,
                           stride_of(buffer, -2), stride_of(buffer, -1)};
    tokens.intermediate_token = stride_of(buffer, 1);
  }
  return params;
}

namespace {

struct SelectiveStateUpdate : InPlaceOp<Inputs> {
  static constexpr char kSchema[] = "ssm_kernels::selective_state_update";
  static constexpr const char *kName = kOp, *kScan = selective_state_update::kScan;

  static auto tensors(const Inputs& in) { return std::tie(in.state, in.x, in.dt, in.A, in.B, in.C, in.D, in.z, in.dt_bias); }

  static void count_writes(const Inputs& in) { torch::autograd::increment_version(in.state); }

  // Inputs in the autocast dtype, parameters in float32. The state is written to and is not cast.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.dt, in.B, in.C, in.z);
    to.to_float(in.A, in.D, in.dt_bias);
  }

  static at::Tensor meta(const Inputs& in) {
    check_inputs(in);
    return allocate_out(in);
  }
};

struct SelectiveStateUpdateOut : ServerOp<SelectiveStateUpdate> {
  static constexpr char kSchema[] = "ssm_kernels::selective_state_update_out";

  static NoResult meta(const OutInputs& in) {
    check_out_inputs(in);
    return {};
  }
};

}  // namespace

SSM_IN_PLACE_OPERATOR(SelectiveStateUpdate)
SSM_IN_PLACE_OPERATOR(SelectiveStateUpdateOut)

}  // namespace ssm_kernels::selective_state_update
