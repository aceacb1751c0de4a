// selective_state_update_two_sample on every device: checks, conversion to plain data, Meta, Autograd and Autocast.

#include "selective_state_update/two_sample_op.h"

#include <torch/library.h>

#include "torch/checks.h"
#include "torch/choices.h"
#include "torch/complex_states.h"
#include "torch/decoding_op.h"
#include "torch/schemas.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_state_update {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // One step of selective_scan_two_sample, or a few: the state and the samples of the last step are updated in place. The
  // samples have no elements where the discretization reads one: with dt_A, the step of A in place of dt, or with is_complex,
  // as of selective_scan_two_sample. The state, A, B and C are then of the accumulation type.
  schemas.in_place(
      "selective_state_update_two_sample(Tensor(a!) state, Tensor(b!) previous_x, Tensor(c!) previous_B, Tensor x, Tensor dt, "
      "Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? lam=None, "
      "bool dt_softplus=False, Tensor? state_batch_indices=None, Tensor? dt_A=None, *, str discretization, bool "
      "lam_sigmoid=False, float[]? dt_limit=None, bool A_is_log=False, bool is_complex=False, bool conjugate_pairs=True) -> "
      "Tensor");
  // The same with the options of servers that selective_state_update_out has. Slots that receive the state after a token then
  // receive its samples.
  schemas.in_place(
      "selective_state_update_two_sample_out(Tensor(a!) state, Tensor(b!) previous_x, Tensor(c!) previous_B, Tensor x, "
      "Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? lam, bool dt_softplus, "
      "Tensor? state_batch_indices, Tensor? dt_A, str discretization, bool lam_sigmoid, float[]? dt_limit, bool A_is_log, "
      "bool is_complex, bool conjugate_pairs, Tensor(d!) out, Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, "
      "Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None, Tensor(e!)? intermediate_states_buffer=None, "
      "Tensor? intermediate_state_indices=None, bool disable_state_update=False) -> ()");
}

namespace {

constexpr char kTwoSampleStep[] = "selective_state_update", kTwoSampleScan[] = "selective_scan";
constexpr char kStatesBuffer[] = "intermediate_states_buffer";

// The arguments that selective_state_update_out has too.
OutInputs base_of(const TwoSampleOutInputs& in) {
  OutInputs base(in, in.out);
  base.dst_state_batch_indices = in.dst_state_batch_indices;
  base.pad_slot_id = in.pad_slot_id;
  base.num_accepted_tokens = in.num_accepted_tokens;
  base.cu_seqlens = in.cu_seqlens;
  base.intermediate = in.intermediate;
  base.intermediate_state_indices = in.intermediate_state_indices;
  base.disable_state_update = in.disable_state_update;
  return base;
}

// The axes of x in front of those of the channels.
int64_t leading_of(const TwoSampleInputs& in) { return in.x.dim() == in.state.dim() ? 2 : 1; }

void check_complex_inputs(const ArgumentChecks& checks, const TwoSampleInputs& in, Discretization method) {
  check_complex_states(kTwoSampleStep, method, in.discretization, in.state.sym_size(-1));
  for (const NamedTensor& parts : {NamedTensor("state", in.state), NamedTensor("A", in.A)}) {
    TORCH_CHECK(parts.tensor->scalar_type() == checks.accumulate(), kTwoSampleStep, ": expected ", parts.name,
                " of complex states to have dtype ", dtype_name(checks.accumulate()), ", got ",
                dtype_name(parts.tensor->scalar_type()));
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!is_present(in.dt_A) && !in.A_is_log, kTwoSampleStep, ": ", in.A_is_log ? "A_is_log" : "dt_A",
                              " is not supported with a complex A");
}

// Shapes of x, for messages.
struct InputNames {
  const char *channels, *heads;
};
constexpr InputNames kNamesOfOneToken{"(batch, dim)", "(batch, heads, headdim)"},
    kNamesOfTokens{"(batch, tokens, dim)", "(batch, tokens, heads, headdim)"},
    kNamesOfPacked{"(tokens, dim)", "(tokens, heads, headdim)"};

void check_samples(const TwoSampleInputs& in, const InputNames& names) {
  const ArgumentChecks checks(kTwoSampleStep, "x", in.x);
  const at::ScalarType dtype = in.x.scalar_type();
  const bool has_heads = in.state.dim() == 4, has_groups = in.B.dim() == leading_of(in) + 2;
  check_defined(kTwoSampleStep, "previous_x", in.previous_x);
  check_defined(kTwoSampleStep, "previous_B", in.previous_B);
  const Discretization method = parse_discretization(kTwoSampleStep, in.discretization,
                                                     is_present(in.dt_A) || in.is_complex ? in.supports : &is_two_sample);
  if (in.is_complex) check_complex_inputs(checks, in, method);
  if (is_present(in.dt_A)) check_takes_delta_A(kTwoSampleStep, "dt_A", method, in.discretization);
  const char* const axes = has_heads ? names.heads : names.channels;
  checks.tensor("lam", in.lam, axes, in.x.sym_sizes(), dtype);
  checks.tensor("dt_A", in.dt_A, axes, in.x.sym_sizes(), dtype);
  check_lam_options(kTwoSampleStep, method, in.discretization, is_present(in.lam), in.lam_sigmoid);
  if (!is_two_sample(method)) {
    checks.tensor("previous_x", in.previous_x, "(0,)", {0}, dtype);
    checks.tensor("previous_B", in.previous_B, "(0,)", {0}, dtype);
    return;
  }
  checks.tensor("previous_x", in.previous_x, has_heads ? "(batch, heads, headdim)" : "(batch, dim)",
                in.state.sym_sizes().slice(0, in.state.dim() - 1), dtype);
  c10::SymDimVector shape = {in.state.sym_size(0)};
  if (has_groups) shape.push_back(in.B.sym_size(-2));
  shape.push_back(in.B.sym_size(-1));
  checks.tensor("previous_B", in.previous_B, has_groups ? "(batch, groups, dstate)" : "(batch, dstate)", shape,
                in.is_complex ? checks.accumulate() : dtype);
}

// The step writes to the samples, which must share memory with no other argument. make_params checks the state against the
// arguments of a step with one sample.
void check_sample_writes(const TwoSampleInputs& in) {
  const NamedTensor state("state", in.state), lam("lam", in.lam), dt_A("dt_A", in.dt_A),
      previous_B("previous_B", in.previous_B);
  for (const NamedTensor& sample : {NamedTensor("previous_x", in.previous_x), previous_B}) {
    check_in_place(kTwoSampleStep, sample.name, *sample.tensor, read_arguments(in));
    check_in_place(kTwoSampleStep, sample.name, *sample.tensor, {state, lam, dt_A});
  }
  check_in_place(kTwoSampleStep, "previous_x", in.previous_x, {previous_B});
  check_in_place(kTwoSampleStep, "state", in.state, {lam, dt_A});
}

}  // namespace

void check_inputs(const TwoSampleInputs& in) {
  check_inputs(static_cast<const Inputs&>(in));
  check_samples(in, leading_of(in) == 2 ? kNamesOfTokens : kNamesOfOneToken);
}

void check_out_inputs(const TwoSampleOutInputs& in) {
  check_out_inputs(base_of(in));
  check_samples(in, in.is_packed() ? kNamesOfPacked : leading_of(in) == 2 ? kNamesOfTokens : kNamesOfOneToken);
}

StateUpdateParams make_params(const TwoSampleInputs& in, const at::Tensor& out) {
  check_sample_writes(in);
  return make_params(static_cast<const Inputs&>(in), out);
}

StateUpdateParams make_out_params(const TwoSampleOutInputs& in, TokenParams& tokens) {
  check_sample_writes(in);
  const NamedTensor samples[] = {
      {"previous_x", in.previous_x}, {"previous_B", in.previous_B}, {"lam", in.lam}, {"dt_A", in.dt_A}};
  check_writes(kTwoSampleStep, {{"out", in.out}, {kStatesBuffer, in.intermediate}}, samples, in.decoding());
  return make_out_params(base_of(in), tokens);
}

TwoSampleParams make_two_sample_params(const TwoSampleInputs& in, bool is_packed) {
  const bool has_heads = in.state.dim() == 4, has_groups = in.previous_B.dim() == 3;
  const auto channels = [&](const at::Tensor& tensor, Access access) {
    return ChannelView{data_of(tensor, access), stride_of(tensor, 0), has_heads ? stride_of(tensor, -2) : 0,
                       stride_of(tensor, -1)};
  };
  TwoSampleParams params;
  params.method = parse_method_parameters(in.discretization);
  params.lam_sigmoid = in.lam_sigmoid;
  params.is_complex = in.is_complex;
  params.conjugate_pairs = in.conjugate_pairs;
  const auto read = [&](const OptionalTensor& tensor, ChannelView& view, int64_t& token) {
    if (!is_present(tensor)) return;
    view = channels(*tensor, Access::kRead);
    token = is_packed ? view.stride_batch : leading_of(in) == 2 ? stride_of(*tensor, 1) : 0;
    if (is_packed) view.stride_batch = 0;
  };
  read(in.lam, params.lam, params.lam_token);
  read(in.dt_A, params.dt_A, params.dt_A_token);
  if (in.previous_x.dim() == 1) return params;
  params.previous_x = channels(in.previous_x, Access::kWrite);
  params.previous_B = {data_of(in.previous_B, Access::kWrite), stride_of(in.previous_B, 0),
                       has_groups ? stride_of(in.previous_B, 1) : 0, stride_of(in.previous_B, -1)};
  return params;
}

namespace {

struct SelectiveStateUpdateTwoSample : InPlaceOp<TwoSampleInputs> {
  static constexpr char kSchema[] = "ssm_kernels::selective_state_update_two_sample";
  static constexpr const char *kName = kTwoSampleStep, *kScan = kTwoSampleScan;
  static constexpr size_t kStates = 3;

  static auto tensors(const Inputs& in) {
    return std::tie(in.state, in.previous_x, in.previous_B, in.x, in.dt, in.A, in.B, in.C, in.D, in.z, in.dt_bias, in.lam,
                    in.dt_A);
  }

  static void count_writes(const Inputs& in) {
    for (const at::Tensor* written : {&in.state, &in.previous_x, &in.previous_B}) torch::autograd::increment_version(*written);
  }

  // Inputs in the autocast dtype, parameters in float32. The state and the samples are written to and are not cast.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.dt, in.z);
    in.is_complex ? to.to_float(in.B, in.C) : to.to_lower(in.B, in.C);
    to.expanded_to_lower(in.lam);
    to.expanded_to_lower(in.dt_A);
    to.to_float(in.A, in.D, in.dt_bias);
  }

  static at::Tensor meta(const Inputs& in) {
    check_inputs(in);
    return allocate_out(in);
  }
};

struct SelectiveStateUpdateTwoSampleOut : ServerOp<SelectiveStateUpdateTwoSample> {
  static constexpr char kSchema[] = "ssm_kernels::selective_state_update_two_sample_out";
  static constexpr size_t kStates = 3;

  static NoResult meta(const TwoSampleOutInputs& in) {
    check_out_inputs(in);
    return {};
  }
};

}  // namespace

SSM_IN_PLACE_OPERATOR(SelectiveStateUpdateTwoSample)
SSM_IN_PLACE_OPERATOR(SelectiveStateUpdateTwoSampleOut)

}  // namespace ssm_kernels::selective_state_update
