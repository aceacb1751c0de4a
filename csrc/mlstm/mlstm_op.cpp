// mlstm_scan, the recurrence of xLSTM's matrix memory, on every device: checks, allocation, Meta, Autograd and Autocast.

#include "mlstm/mlstm_op.h"

#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"
#include "torch/states_at.h"

#ifdef SSM_KERNELS_WITH_CUDA
#include "cuda/device.h"
#endif

namespace ssm_kernels::mlstm {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The matrix memory of xLSTM: C_t = sigmoid(f_t) C_{t-1} + e^i_t v_t k_t^T and n_t likewise of k_t alone, out = scale C q /
  // max(|scale n q|, 1), with C and n in units of e^m. With input_gate "sigmoid" e^i is sigmoid(i). With reverse, time runs
  // from the last step to the first.
  schemas.def(
      "mlstm_scan(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, *, float? scale=None, float eps=1e-06, "
      "str input_gate='exp', bool normalize=True, Tensor? initial_C=None, Tensor? initial_n=None, Tensor? initial_m=None, "
      "Tensor? cu_seqlens=None, Tensor? seq_idx=None, bool reverse=False) "
      "-> (Tensor out, Tensor final_C, Tensor final_n, Tensor final_m)");
  // _mlstm_scan is the differentiable form with all arguments positional, as vmap wants them. _mlstm_scan_fwd is forward alone
  // and also returns the divisor, which backward reads.
  const std::string arguments =
      "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, float? scale, float eps, str input_gate, bool normalize, "
      "Tensor? initial_C, Tensor? initial_n, Tensor? initial_m, Tensor? cu_seqlens, Tensor? seq_idx, bool reverse";
  const std::string results = ") -> (Tensor out, Tensor final_C, Tensor final_n, Tensor final_m";
  schemas.def("_mlstm_scan(" + arguments + results + ")");
  // The scan, and its states at positions, (batch, positions, ...): as ops/_states_at.py describes.
  schemas.def("_mlstm_scan_states_at(" + arguments + ", int[] states_at" + results +
              ", Tensor states_C, Tensor states_n, Tensor states_m)");
  schemas.kernels("_mlstm_scan_fwd(" + arguments + results + ", Tensor divisor)");
  // The adjoint of _mlstm_scan_fwd, which takes m as a constant: the gradient of initial_m is zero, and that of final_m is no
  // argument. Gradients that are absent or not needed have no elements.
  schemas.kernels("_mlstm_scan_bwd(Tensor? grad_out, Tensor? grad_final_C, Tensor? grad_final_n, Tensor? divisor, " +
                  arguments +
                  ", bool[8] needs_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_i, Tensor grad_f, "
                  "Tensor grad_initial_C, Tensor grad_initial_n, Tensor grad_initial_m)");
}

namespace {

constexpr char kOp[] = "mlstm_scan";
constexpr char kKeys[] = "(batch, seqlen, heads, key_dim)";
constexpr char kValues[] = "(batch, seqlen, heads, value_dim)";
constexpr char kGates[] = "(batch, seqlen, heads)";

using Shape = std::vector<c10::SymInt>;

c10::SymInt states_of(const Inputs& in) { return count_states(in.cu_seqlens, in.q.sym_size(0)); }
Shape C_shape(const Inputs& in) { return {states_of(in), in.q.sym_size(2), in.v.sym_size(3), in.q.sym_size(3)}; }
Shape n_shape(const Inputs& in) { return {states_of(in), in.q.sym_size(2), in.q.sym_size(3)}; }
Shape m_shape(const Inputs& in) { return {states_of(in), in.q.sym_size(2)}; }
Shape gate_shape(const Inputs& in) { return {in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2)}; }

const char* axes(const Inputs& in, const char* of_sequences, const char* of_rows) {
  return is_present(in.cu_seqlens) ? of_sequences : of_rows;
}
const char* C_axes(const Inputs& in) {
  return axes(in, "(sequences, heads, value_dim, key_dim)", "(batch, heads, value_dim, key_dim)");
}
const char* n_axes(const Inputs& in) { return axes(in, "(sequences, heads, key_dim)", "(batch, heads, key_dim)"); }

at::TensorOptions wide_options(const Inputs& in) { return in.q.options().dtype(accumulate_type(in.q.scalar_type())); }

}  // namespace

InputGate parse_input_gate(const char* op, std::string_view name) {
  TORCH_CHECK_VALUE(name == "exp" || name == "sigmoid", op, ": expected input_gate \"exp\" or \"sigmoid\", got \"", name, "\"");
  return name == "exp" ? InputGate::kExp : InputGate::kSigmoid;
}

void check_options(const char* op, std::optional<double> scale, double eps, std::string_view input_gate, bool normalize) {
  const InputGate gate = parse_input_gate(op, input_gate);
  TORCH_CHECK_VALUE(normalize || gate == InputGate::kSigmoid, op,
                    ": expected normalize with input_gate \"exp\", whose sums are in units that only the division removes");
  TORCH_CHECK_VALUE(!scale.has_value() || std::isfinite(*scale), op, ": expected a finite scale, got ", scale.value_or(0));
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), op, ": expected a finite eps of at least 0, got ", eps);
}

double scale_of(const Inputs& in) {
  return in.scale.has_value() ? *in.scale : 1 / std::sqrt(static_cast<double>(in.q.size(3)));
}

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "q", in.q);
  checks.rank("q", in.q, 4, kKeys);
  checks.rank("v", in.v, 4, kValues);
  check_options(kOp, in.scale, in.eps, in.input_gate, in.normalize);
  const c10::SymInt batch = in.q.sym_size(0), seqlen = in.q.sym_size(1), heads = in.q.sym_size(2), key_dim = in.q.sym_size(3);
  const c10::SymInt value_dim = in.v.sym_size(3);
  const at::ScalarType dtype = in.q.scalar_type(), accumulate = checks.accumulate();
  TORCH_CHECK_VALUE(key_dim >= 1 && key_dim <= kMaxKeyDim, kOp, ": expected key_dim from 1 to ", kMaxKeyDim, ", got ", key_dim);
  TORCH_CHECK_VALUE(value_dim >= 1, kOp, ": expected value_dim of at least 1, got v of shape ", in.v.sym_sizes());
  TORCH_CHECK_VALUE(heads >= 1, kOp, ": expected at least one head, got q of shape ", in.q.sym_sizes());
  checks.tensor("k", in.k, kKeys, in.q.sym_sizes(), dtype);
  checks.tensor("v", in.v, kValues, {batch, seqlen, heads, value_dim}, dtype);
  checks.parameter("i", in.i, kGates, gate_shape(in));
  checks.parameter("f", in.f, kGates, gate_shape(in));
  check_sequences(checks, in.seq_idx, in.cu_seqlens, batch, seqlen);
  const bool has_C = is_present(in.initial_C), has_n = is_present(in.initial_n), has_m = is_present(in.initial_m);
  TORCH_CHECK_VALUE(has_C == has_n && has_n == has_m, kOp,
                    ": expected initial states C, n and m or none of them, got C = ", has_C ? "a tensor" : "None",
                    ", n = ", has_n ? "a tensor" : "None", ", m = ", has_m ? "a tensor" : "None");
  checks.tensor("initial_C", in.initial_C, C_axes(in), C_shape(in), accumulate);
  checks.tensor("initial_n", in.initial_n, n_axes(in), n_shape(in), accumulate);
  checks.tensor("initial_m", in.initial_m, axes(in, "(sequences, heads)", "(batch, heads)"), m_shape(in), accumulate);
}

FwdOutputs allocate_fwd(const Inputs& in) {
  const at::TensorOptions options = wide_options(in);
  return {{empty_tensor_like(in.v), empty_tensor(C_shape(in), options), empty_tensor(n_shape(in), options),
           empty_tensor(m_shape(in), options)},
          in.normalize ? empty_tensor(gate_shape(in), options) : empty_tensor({0}, options)};
}

GradTensors allocate_bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const ArgumentChecks checks("mlstm_scan backward", "q", in.q);
  checks.tensor("grad_out", bwd.grad_out, kValues, in.v.sym_sizes(), in.q.scalar_type());
  checks.tensor("grad_final_C", bwd.grad_final_C, C_axes(in), C_shape(in), checks.accumulate());
  checks.tensor("grad_final_n", bwd.grad_final_n, n_axes(in), n_shape(in), checks.accumulate());
  if (in.normalize) checks.tensor("divisor", bwd.divisor, kGates, gate_shape(in), checks.accumulate());

  const auto allocate = [&](Grad grad, const OptionalTensor& input, const auto& allocate_like) {
    const bool is_needed = is_present(input) && bwd.needs_grad[grad];
    return is_needed ? allocate_like(*input) : empty_tensor({0}, wide_options(in));
  };
  return {allocate(kGradQ, in.q, empty_tensor_like),
          allocate(kGradK, in.k, empty_tensor_like),
          allocate(kGradV, in.v, empty_tensor_like),
          allocate(kGradI, in.i, empty_tensor_like),
          allocate(kGradF, in.f, empty_tensor_like),
          allocate(kGradC, in.initial_C, empty_contiguous_like),
          allocate(kGradN, in.initial_n, empty_contiguous_like),
          allocate(kGradM, in.initial_m, empty_contiguous_like)};
}

namespace {

struct MlstmScan : DifferentiableOp<MlstmScan, BwdInputs, Outputs> {
  static constexpr char kSchema[] = "ssm_kernels::_mlstm_scan";
  static constexpr char kForward[] = "ssm_kernels::_mlstm_scan_fwd", kBackward[] = "ssm_kernels::_mlstm_scan_bwd";

  static const char* name(const Inputs&) { return kOp; }

  static auto differentiable(Inputs& in) {
    return std::tie(in.q, in.k, in.v, in.i, in.f, in.initial_C, in.initial_n, in.initial_m);
  }

  static Outputs forward(Inputs& in, variable_list* saved) {
    static const Operator<FwdOutputs, Inputs> op(kForward);
    const FwdOutputs outputs = op(in);
    if (saved != nullptr) *saved = {outputs.divisor};
    return outputs;
  }

  // Casts q, k and v to the autocast dtype and states to float32. Gates of the autocast dtype stay, others become float32, in
  // which a forget gate near one keeps more digits.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.q, in.k, in.v);
    to.to_float_unless(to.lower, in.i, in.f);
    to.to_float(in.initial_C, in.initial_n, in.initial_m);
  }
};

const Operator<Outputs, Inputs>& public_operator() {
  static const Operator<Outputs, Inputs> op("ssm_kernels::mlstm_scan");
  return op;
}

Outputs mlstm_scan(Inputs& in) {
  public_operator().check(in);
  return operator_of<MlstmScan>()(in);
}

struct StatesInputs : Inputs {
  std::vector<int64_t> states_at;

  auto fields() { return std::tuple_cat(Inputs::fields(), std::tie(states_at)); }
};

struct StatesOutputs : Outputs {
  at::Tensor states_C, states_n, states_m;

  auto fields() { return std::tuple_cat(Outputs::fields(), std::tie(states_C, states_n, states_m)); }
};

// The scan, and its states at positions. A composition of operators, so that autograd, vmap and exporters know only those.
struct MlstmScanStatesAt {
  static constexpr char kSchema[] = "ssm_kernels::_mlstm_scan_states_at";
  static constexpr bool kIsPublic = false;
  using Inputs = StatesInputs;
  using Result = StatesOutputs;

  static void cast(Inputs& in, const Autocast& to) {
    public_operator().check(in);
    MlstmScan::cast(in, to);
  }

  static StatesOutputs call(Inputs& in) {
    public_operator().check(in);
    check_inputs(in);
    const c10::SymInt seqlen = in.q.sym_size(1);
    check_states_at(kOp, in.states_at, seqlen, in.reverse);
    const auto scan = [&](const Piece& piece) -> std::vector<at::Tensor> {
      mlstm::Inputs part = in;
      piece.cut(1, part.q, part.k, part.v, part.i, part.f, part.seq_idx);
      part.initial_C = piece.state(0);
      part.initial_n = piece.state(1);
      part.initial_m = piece.state(2);
      part.cu_seqlens = piece.cu_seqlens;
      const Outputs outputs = public_operator()(part);
      return {outputs.out, outputs.final_C, outputs.final_n, outputs.final_m};
    };
    std::vector<at::Tensor> initial;
    if (is_present(in.initial_C)) initial = {*in.initial_C, *in.initial_n, *in.initial_m};
    const double empty_unit = -std::numeric_limits<double>::infinity();
    auto [out, last, states] =
        scan_pieces({seqlen, 1, false, initial, in.seq_idx, in.cu_seqlens, scan, {0, 0, empty_unit}}, in.states_at);
    return {{out, last[0], last[1], last[2]}, states[0], states[1], states[2]};
  }
};

// Checks the values of cu_seqlens. On CUDA the host waits for them: once, in forward, unless a CUDA graph is being captured.
// Kernels read valid memory for any values.
void check_packed(const Inputs& in, bool is_backward) {
  if (!is_present(in.cu_seqlens)) return;
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda() && (is_backward || cuda::is_capturing())) return;
#endif
  check_cu_seqlens_values(kOp, in.cu_seqlens->cpu(), in.q.size(1));
}

}  // namespace

FwdOutputs fwd(const Inputs& in) {
  if (in.q.is_meta()) return meta<check_inputs, allocate_fwd>(in);
  check_inputs(in);
  check_packed(in, /*is_backward=*/false);
  return in.reverse ? reverse_scan(in) : scan(in);
}

GradTensors bwd(const BwdInputs& bwd) {
  if (bwd.in.q.is_meta()) return meta<check_inputs, allocate_bwd>(bwd);
  check_inputs(bwd.in);
  check_packed(bwd.in, /*is_backward=*/true);
  return bwd.in.reverse ? reverse_scan_bwd(bwd) : scan_bwd(bwd);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&mlstm_scan>(m, "mlstm_scan");
  implement<&MlstmScanStatesAt::call>(m, MlstmScanStatesAt::kSchema);
}

SSM_DIFFERENTIABLE_OPERATOR(MlstmScan)
SSM_AUTOCAST_OPERATOR(MlstmScanStatesAt)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&fwd>(m, "_mlstm_scan_fwd");
  implement<&bwd>(m, "_mlstm_scan_bwd");
}

}  // namespace ssm_kernels::mlstm
