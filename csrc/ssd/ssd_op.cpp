// ssd_chunk_scan, the chunked scan of structured state-space duality (SSD), on every device: checks, allocation, Meta, Autograd
// and Autocast, and the registration of the devices' kernels.

#include "ssd/ssd_op.h"

#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <iterator>
#include <limits>
#include <set>
#include <tuple>
#include <vector>

#include "common/limits.h"
#include "ssd/aten/chunked_scan.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/states_at.h"

namespace ssm_kernels::ssd {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The scan in chunks (SSD, Mamba-2), which mamba_ssm calls mamba_chunk_scan_combined: S_t = e^zeta_t S_{t-1} + d_t k(zeta_t)
  // x_t B_t^T with zeta = d A, one A for a head; out = (S C + D x) silu(z). With log_decay in place of dt and A, S_t =
  // e^log_decay_t S_{t-1} + gain_t x_t B_t^T. With reverse, S_t follows from S_{t+1}. dt_limit absent: no limits, as in
  // selective_state_update; the Python function's default is (0, inf). chunk_size is a hint.
  schemas.def(
      "ssd_chunk_scan(Tensor x, Tensor? dt, Tensor? A, Tensor B, Tensor C, *, SymInt? chunk_size=None, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float[]? dt_limit=None, Tensor? initial_states=None, "
      "Tensor? seq_idx=None, Tensor? cu_seqlens=None, str discretization='zoh', bool reverse=False, "
      "Tensor? log_decay=None, Tensor? gain=None) -> (Tensor out, Tensor final_states)");
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone. Also, for tests, the kernel
  // that a call takes: "kernel=<aten, short, sm80 or sm90> products=... chunk=..." and how the work is divided.
  const std::string ssd_arguments =
      "(Tensor x, Tensor? dt, Tensor? A, Tensor B, Tensor C, SymInt? chunk_size, Tensor? D, Tensor? z, Tensor? dt_bias, "
      "bool dt_softplus, float dt_min, float dt_max, Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, "
      "str discretization, bool reverse, Tensor? log_decay, Tensor? gain";
  const std::string ssd_results = ") -> (Tensor out, Tensor final_states)";
  schemas.def("_ssd_chunk_scan" + ssd_arguments + ssd_results);
  schemas.kernels("_ssd_chunk_scan_fwd" + ssd_arguments + ssd_results);
  schemas.def("_ssd_chunk_scan_plan" + ssd_arguments + ", bool is_backward) -> str");
  // Its adjoint, which recomputes what it needs of forward. Gradients that are absent or not needed have no elements.
  const std::string ssd_inputs = ssd_arguments.substr(1);
  const std::string ssd_gradients =
      ", bool[11] needs_grad) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D, "
      "Tensor grad_z, Tensor grad_dt_bias, Tensor grad_initial_states, Tensor grad_log_decay, Tensor grad_gain)";
  schemas.kernels("_ssd_chunk_scan_bwd(Tensor? grad_out, Tensor? grad_final_states, " + ssd_inputs + ssd_gradients);
  // The scan, and its states at positions: as ops/_states_at.py describes.
  schemas.def(
      "_ssd_chunk_scan_states_at(Tensor x, Tensor? dt, Tensor? A, Tensor B, Tensor C, SymInt? chunk_size, Tensor? D, Tensor? "
      "z, "
      "Tensor? dt_bias, bool dt_softplus, float[]? dt_limit, Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, "
      "str discretization, bool reverse, Tensor? log_decay, Tensor? gain, int[] states_at, bool by_pieces) "
      "-> (Tensor out, Tensor final_states, Tensor states)");
  // The scan of sequences that are not packed, not in reverse, and the states after so many steps, ascending. On CUDA forward
  // takes the kernels of the scan; backward is matmuls on any device.
  const std::string ssd_states = ", int[] states_at) -> (Tensor out, Tensor final_states, Tensor states)";
  schemas.def("_ssd_chunk_scan_states" + ssd_arguments + ssd_states);
  schemas.kernels("_ssd_chunk_scan_states_fwd" + ssd_arguments + ssd_states);
  schemas.kernels("_ssd_chunk_scan_states_bwd(Tensor? grad_out, Tensor? grad_final_states, Tensor? grad_states, " + ssd_inputs +
                  ", int[] states_at" + ssd_gradients);
}

namespace {

constexpr char kOp[] = "ssd_chunk_scan";
constexpr char kSequence[] = "(batch, seqlen, heads, headdim)";
constexpr char kMatrix[] = "(batch, seqlen, groups, dstate)";

const char* states_axes(const Inputs& in) {
  return is_present(in.cu_seqlens) ? "(sequences, heads, headdim, dstate)" : "(batch, heads, headdim, dstate)";
}

std::vector<c10::SymInt> states_shape(const Inputs& in) {
  return {count_states(in.cu_seqlens, in.x.sym_size(0)), in.x.sym_size(2), in.x.sym_size(3), in.B.sym_size(-1)};
}

// The decay of a chunk is the exponential of a sum over time, which only these methods have. The gain is a multiple of dt.
bool is_exponential(Discretization discretization) {
  if (!is_basic(discretization)) return false;
  bool result = false;
  visit_discretization(discretization, [&](auto method) { result = decltype(method)::kExponential; });
  return result;
}

// Names the layout of an x whose second axis, not the third, has as many entries as A.
void check_layout(const char* op, const Inputs& in) {
  if (!is_present(in.A) || in.A->dim() != 1) return;
  const c10::SymInt heads = in.A->sym_size(0);
  if (in.x.sym_size(2) == heads || in.x.sym_size(1) != heads) return;
  // (batch, heads, seqlen, headdim), or with seqlen last, as the sequences of B tell.
  const bool is_last = in.x.sym_size(3) == in.B.sym_size(1) && in.x.sym_size(2) != in.B.sym_size(1);
  TORCH_CHECK_VALUE(false, op, ": expected x of shape ", kSequence, " with heads = ", heads,
                    ", the size of A, got (batch, heads, ", is_last ? "headdim, seqlen" : "seqlen, headdim",
                    ") = ", in.x.sym_sizes(), ": pass x.", is_last ? "permute(0, 3, 1, 2)" : "transpose(1, 2)",
                    ", and dt, z, B and C likewise");
}

void check_options(const char* op, const Inputs& in) {
  if (in.chunk_size.has_value()) {
    TORCH_CHECK_VALUE(*in.chunk_size >= 1, op, ": expected chunk_size of at least 1, got ", *in.chunk_size);
  }
  check_dt_limit(op, in.dt_min, in.dt_max);
}

// Either dt and A, or log_decay without what makes step sizes of dt.
void check_form(const char* op, const Inputs& in) {
  const bool has_dt = is_present(in.dt), has_A = is_present(in.A), has_log_decay = is_present(in.log_decay);
  TORCH_CHECK_VALUE(has_dt == has_A && has_dt != has_log_decay, op,
                    ": expected either dt and A or log_decay, got dt = ", has_dt ? "a tensor" : "None",
                    ", A = ", has_A ? "a tensor" : "None", ", log_decay = ", has_log_decay ? "a tensor" : "None");
  TORCH_CHECK_VALUE(has_log_decay || !is_present(in.gain), op, ": expected gain with log_decay only, got it with dt and A");
  if (!has_log_decay) return;
  // The default of the Python function, (0, inf), and no limits are alike here.
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto [min, max] = kernel_dt_limit(in.dt_min, in.dt_max);
  const bool has_limits = (min != -kInfinity && min != 0) || max != kInfinity;
  const char* option = is_present(in.dt_bias)       ? "dt_bias"
                       : in.dt_softplus             ? "dt_softplus"
                       : has_limits                 ? "dt_limit"
                       : in.discretization != "zoh" ? "discretization"
                                                    : nullptr;
  TORCH_CHECK_VALUE(option == nullptr, op, ": expected ", option, " with dt and A only, got it with log_decay");
}

}  // namespace

Discretization check_inputs_of(const char* op, const Inputs& in, bool (*is_supported)(Discretization)) {
  const ArgumentChecks checks(op, "x", in.x);
  checks.rank("x", in.x, 4, kSequence);
  const bool has_ranks = in.ranks != nullptr;
  const char* const matrix = has_ranks ? "(batch, seqlen, ranks, groups, dstate)" : kMatrix;
  checks.rank("B", in.B, has_ranks ? 5 : 4, matrix);
  const c10::SymInt batch = in.x.sym_size(0), seqlen = in.x.sym_size(1), heads = in.x.sym_size(2), headdim = in.x.sym_size(3);
  const c10::SymInt groups = in.B.sym_size(-2), dstate = in.B.sym_size(-1);
  const at::ScalarType dtype = in.x.scalar_type(), accumulate = checks.accumulate();
  check_form(op, in);
  check_layout(op, in);
  TORCH_CHECK_VALUE(headdim >= 1 && headdim <= kMaxHeaddim, op, ": expected headdim from 1 to ", kMaxHeaddim, ", got ",
                    headdim);
  checks.tensor("dt", in.dt, "(batch, seqlen, heads)", {batch, seqlen, heads}, dtype);
  checks.tensor("A", in.A, "(heads,)", {heads}, accumulate);
  checks.parameter("log_decay", in.log_decay, "(batch, seqlen, heads)", {batch, seqlen, heads});
  checks.parameter("gain", in.gain, "(batch, seqlen, heads)", {batch, seqlen, heads});
  checks.parameter("diagonal_gain", in.diagonal_gain, "(batch, seqlen, heads)", {batch, seqlen, heads});
  std::vector<c10::SymInt> shape = {batch, seqlen, groups, dstate};
  if (has_ranks) shape.insert(shape.begin() + 2, in.ranks->count);
  checks.tensor("B", in.B, matrix, shape, dtype);
  TORCH_CHECK_VALUE(groups > 0 && heads % groups == 0, op, ": expected the groups of B and C to divide heads = ", heads,
                    ", got ", groups);
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, op, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  checks.tensor("C", in.C, matrix, in.B.sym_sizes(), dtype);
  if (is_present(in.D)) {
    const c10::SymIntArrayRef shape = in.D->sym_sizes();
    const bool is_right =
        (shape.size() == 1 && shape[0] == heads) || (shape.size() == 2 && shape[0] == heads && shape[1] == headdim);
    TORCH_CHECK_VALUE(is_right, op, ": expected D of shape (heads,) = [", heads, "] or (heads, headdim) = [", heads, ", ",
                      headdim, "], got ", shape);
    checks.tensor("D", in.D, "(heads,) or (heads, headdim)", shape, accumulate);
  }
  checks.tensor("z", in.z, kSequence, in.x.sym_sizes(), dtype);
  checks.tensor("dt_bias", in.dt_bias, "(heads,)", {heads}, accumulate);
  check_options(op, in);
  check_sequences(checks, in.seq_idx, in.cu_seqlens, batch, seqlen);
  checks.tensor("initial_states", in.initial_states, states_axes(in), states_shape(in), accumulate);
  return parse_discretization(op, in.discretization, is_supported);
}

bool is_exponential_two_sample(Discretization method) {
  return method == Discretization::kFohRamp || method == Discretization::kExpTrapezoidal;
}

void check_decay(std::string_view discretization) {
  parse_discretization(kOp, discretization,
                       [](Discretization method) { return is_exponential(method) || is_exponential_two_sample(method); });
}

Discretization check_inputs_of(const char* op, const Inputs& in) { return check_inputs_of(op, in, &is_exponential); }

Discretization check_inputs(const Inputs& in) {
  check_decay(in.discretization);
  return check_inputs_of(kOp, in);
}

FwdOutputs allocate_fwd(const Inputs& in) {
  return {empty_tensor_like(in.x), empty_tensor(states_shape(in), wide_options(in.x))};
}

Discretization check_states_inputs(const StatesInputs& in) {
  const Discretization method = check_inputs(in);
  TORCH_CHECK_VALUE(!is_present(in.cu_seqlens), kOp, ": expected states_at without cu_seqlens in this operator");
  TORCH_CHECK_VALUE(!in.reverse, kOp, ": expected states_at without reverse, got both");
  for (size_t i = 0; i < in.states_at.size(); ++i) {
    const int64_t position = in.states_at[i];
    TORCH_CHECK_VALUE(position >= 0 && position <= in.x.sym_size(1), kOp,
                      ": expected states_at from 0 to seqlen = ", in.x.sym_size(1), ", got ", position);
    TORCH_CHECK_VALUE(i == 0 || in.states_at[i - 1] < position, kOp, ": expected states_at in ascending order, got ",
                      at::IntArrayRef(in.states_at));
  }
  return method;
}

namespace {

std::vector<c10::SymInt> states_at_shape(const StatesInputs& in) {
  std::vector<c10::SymInt> shape = states_shape(in);
  shape.insert(shape.begin() + 1, static_cast<int64_t>(in.states_at.size()));
  return shape;
}

}  // namespace

StatesOutputs allocate_states(const StatesInputs& in) {
  return {allocate_fwd(in), empty_tensor(states_at_shape(in), wide_options(in.x))};
}

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const ArgumentChecks checks("ssd_chunk_scan backward", "x", in.x);
  checks.tensor("grad_out", bwd.grad_out, kSequence, in.x.sym_sizes(), in.x.scalar_type());
  checks.tensor("grad_final_states", bwd.grad_final_states, states_axes(in), states_shape(in), checks.accumulate());

  const auto allocate = [&](Grad grad, const OptionalTensor& input, const auto& allocate_like) {
    const bool is_needed = is_present(input) && bwd.needs_grad[grad];
    if (is_needed && is_present(bwd.targets[grad])) return *bwd.targets[grad];
    return is_needed ? allocate_like(*input) : empty_tensor({0}, wide_options(in.x));
  };
  return {allocate(kGradX, in.x, empty_tensor_like),
          allocate(kGradDt, in.dt, empty_tensor_like),
          allocate(kGradA, in.A, empty_contiguous_like),
          allocate(kGradB, in.B, empty_tensor_like),
          allocate(kGradC, in.C, empty_tensor_like),
          allocate(kGradD, in.D, empty_contiguous_like),
          allocate(kGradZ, in.z, empty_tensor_like),
          allocate(kGradDtBias, in.dt_bias, empty_contiguous_like),
          allocate(kGradInitialStates, in.initial_states, empty_contiguous_like),
          allocate(kGradLogDecay, in.log_decay, empty_tensor_like),
          allocate(kGradGain, in.gain, empty_tensor_like)};
}

GradTensors allocate_states_bwd(const StatesBwdInputs& bwd) {
  const ArgumentChecks checks("ssd_chunk_scan backward", "x", bwd.in.x);
  checks.tensor("grad_states", bwd.grad_states, "(batch, positions, heads, headdim, dstate)", states_at_shape(bwd.in),
                checks.accumulate());
  return allocate_bwd(bwd.of_scan());
}

namespace {

// The public operator's arguments: dt_limit in place of dt_min and dt_max.
struct PublicInputs : Inputs {
  std::optional<at::ArrayRef<double>> dt_limit;

  auto fields() {
    return std::tie(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, cu_seqlens,
                    discretization, reverse, log_decay, gain);
  }
};

// The differentiable operators save the inputs and nothing else.
struct DifferentiableInputs {
  static const char* name(const Inputs&) { return kOp; }

  static auto differentiable(Inputs& in) {
    return std::tie(in.x, in.dt, in.A, in.B, in.C, in.D, in.z, in.dt_bias, in.initial_states, in.log_decay, in.gain);
  }

  // Sequences in the autocast dtype; parameters, states, log decays and gains in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.dt, in.B, in.C, in.z);
    to.to_float(in.A, in.D, in.dt_bias, in.initial_states, in.log_decay, in.gain);
  }
};

struct SsdChunkScan : DifferentiableOp<SsdChunkScan, BwdInputs, FwdOutputs>, DifferentiableInputs {
  static constexpr char kSchema[] = "ssm_kernels::_ssd_chunk_scan";
  static constexpr char kForward[] = "ssm_kernels::_ssd_chunk_scan_fwd", kBackward[] = "ssm_kernels::_ssd_chunk_scan_bwd";
};

struct SsdChunkScanStates : DifferentiableOp<SsdChunkScanStates, StatesBwdInputs, StatesOutputs>, DifferentiableInputs {
  static constexpr char kSchema[] = "ssm_kernels::_ssd_chunk_scan_states";
  static constexpr char kForward[] = "ssm_kernels::_ssd_chunk_scan_states_fwd";
  static constexpr char kBackward[] = "ssm_kernels::_ssd_chunk_scan_states_bwd";
};

const Operator<FwdOutputs, PublicInputs>& public_operator() {
  static const Operator<FwdOutputs, PublicInputs> op("ssm_kernels::ssd_chunk_scan");
  return op;
}

FwdOutputs ssd_chunk_scan(PublicInputs& in) {
  public_operator().check(in);
  std::tie(in.dt_min, in.dt_max) = std::tuple_cat(parse_dt_limit(kOp, in.dt_limit));
  return operator_of<SsdChunkScan>()(in);
}

// The scan, and its states at positions. A composition of operators, so that autograd, vmap and exporters know only those.
struct SsdChunkScanStatesAt {
  static constexpr char kSchema[] = "ssm_kernels::_ssd_chunk_scan_states_at";
  static constexpr bool kIsPublic = false;
  using Inputs = StatesAtInputs<PublicInputs>;
  using Result = StatesAt;

  static void cast(Inputs& in, const Autocast& to) {
    public_operator().check(in);
    DifferentiableInputs::cast(in, to);
  }

  static StatesAt call(Inputs& in) {
    public_operator().check(in);
    std::tie(in.dt_min, in.dt_max) = std::tuple_cat(parse_dt_limit(kOp, in.dt_limit));
    check_inputs(in);
    const c10::SymInt seqlen = in.x.sym_size(1);
    check_states_at(kOp, in.states_at, seqlen, in.reverse);
    // On CUDA the adjoint of the operator that returns states is PyTorch matmuls; those of the pieces are fused kernels.
    const auto needs_graph = [](const auto&... tensors) { return (needs_autograd(tensors) || ...); };
    const bool is_slow = !in.x.is_cpu() && std::apply(needs_graph, DifferentiableInputs::differentiable(in));
    if (!in.by_pieces && !is_present(in.cu_seqlens) && !is_slow) return in_one_call(in);
    const auto scan = [&](const Piece& piece) -> std::vector<at::Tensor> {
      PublicInputs part = in;
      piece.cut(1, part.x, part.dt, part.B, part.C, part.z, part.seq_idx, part.log_decay, part.gain);
      part.initial_states = piece.state();
      part.cu_seqlens = piece.cu_seqlens;
      const FwdOutputs outputs = public_operator()(part);
      return {outputs.out, outputs.final_states};
    };
    return scan_pieces({seqlen, 1, false, one_state(in.initial_states), in.seq_idx, in.cu_seqlens, scan}, in.states_at)
        .of_one();
  }

 private:
  static StatesAt in_one_call(const Inputs& in) {
    StatesInputs call{in, {}};
    const std::set<int64_t> ascending(in.states_at.begin(), in.states_at.end());
    call.states_at.assign(ascending.begin(), ascending.end());
    StatesOutputs outputs = operator_of<SsdChunkScanStates>()(call);
    if (call.states_at != in.states_at) {  // without an index on the device, which the capture of a CUDA graph refuses
      const std::vector<at::Tensor> each = outputs.states.unbind(1);
      std::vector<at::Tensor> chosen;
      for (const int64_t position : in.states_at)
        chosen.push_back(each[std::distance(ascending.begin(), ascending.find(position))]);
      outputs.states = at::stack(chosen, 1);
    }
    return {outputs.out, outputs.final_states, outputs.states};
  }
};

}  // namespace

FwdOutputs fwd(const Inputs& in) {
  if (in.x.is_meta()) return meta<check_inputs, allocate_fwd>(in);
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.x.is_cuda() && in.ranks == nullptr) return fwd_cuda(in);
  if (in.x.is_cuda() && takes_rank_kernels(in, /*is_backward=*/false)) return fwd_ranks_cuda(in);
#endif
  return fwd_aten(in);
}

GradTensors bwd(const BwdInputs& bwd) {
  if (bwd.in.x.is_meta()) return meta<check_inputs, allocate_bwd>(bwd);
#ifdef SSM_KERNELS_WITH_CUDA
  if (bwd.in.x.is_cuda() && bwd.in.ranks == nullptr) return bwd_cuda(bwd);
  if (bwd.in.x.is_cuda() && takes_rank_kernels(bwd.in, /*is_backward=*/true)) return bwd_ranks_cuda(bwd);
#endif
  return bwd_aten(bwd);
}

StatesOutputs states_fwd(const StatesInputs& in) {
  if (in.x.is_meta()) return meta<check_states_inputs, allocate_states>(in);
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.x.is_cuda()) return states_cuda(in);
#endif
  return states_aten(in);
}

GradTensors states_bwd(const StatesBwdInputs& bwd) {
  if (bwd.in.x.is_meta()) return meta<check_states_inputs, allocate_states_bwd>(bwd);
  return states_bwd_aten(bwd);
}

// A forward call, or its backward.
struct PlannedCall : Inputs {
  bool is_backward = false;

  auto fields() { return std::tuple_cat(Inputs::fields(), std::tie(is_backward)); }
};

std::string plan(const PlannedCall& call) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (call.x.is_cuda()) return plan_cuda(call, call.is_backward);
#endif
  return plan_aten(call);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&ssd_chunk_scan>(m, "ssd_chunk_scan");
  implement<&SsdChunkScanStatesAt::call>(m, SsdChunkScanStatesAt::kSchema);
}

SSM_DIFFERENTIABLE_OPERATOR(SsdChunkScan)
SSM_DIFFERENTIABLE_OPERATOR(SsdChunkScanStates)
SSM_AUTOCAST_OPERATOR(SsdChunkScanStatesAt)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&fwd>(m, "_ssd_chunk_scan_fwd");
  implement<&bwd>(m, "_ssd_chunk_scan_bwd");
  implement<&states_fwd>(m, "_ssd_chunk_scan_states_fwd");
  implement<&states_bwd>(m, "_ssd_chunk_scan_states_bwd");
  implement<&plan>(m, "_ssd_chunk_scan_plan");
}

}  // namespace ssm_kernels::ssd
