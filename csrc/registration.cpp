// The schema of every operator, and the kernels that are the same for all. The others are registered in the operator's folder:
// Autograd, Autocast and Meta by <operator>_op.cpp, the devices' by cpu/entry.cpp and cuda/entry.cpp, or by <operator>_op.cpp
// if one function serves both devices.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "linear_scan/linear_scan_op.h"
#include "torch/arguments.h"
#include "torch/missing_cuda.h"

TORCH_LIBRARY(ssm_kernels, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  // Sets a process-wide option of torch/debug_options.h and returns its previous value. For tests and measurements.
  m.def("_set_debug_option(str name, int value) -> int", tags);

  // Selective scan: h_t = Abar(z_t) h_{t-1} + delta_t k(z_t) B_t u_t with z = delta A; out = (<C, h> + D u) silu(z).
  m.def(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? delta_bias=None, Tensor? initial_state=None, *, str discretization='zoh', bool delta_softplus=False) "
      "-> (Tensor out, Tensor last_state)",
      tags);
  // The scan, and the state at each chunk boundary, from which backward recomputes the states inside it.
  m.def(
      "_selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, str discretization, bool delta_softplus, bool save_chunk_states) "
      "-> (Tensor out, Tensor last_state, Tensor chunk_states)",
      tags);
  // The scan's adjoint. Gradients that are absent or not needed have no elements; the last of needs_grad is of initial_state.
  m.def(
      "_selective_scan_bwd(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor chunk_states, str discretization, bool delta_softplus, "
      "bool[9] needs_grad) -> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
      "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state)",
      tags);
  // As above, but writes grad_z, and grad_delta if given, into the caller's tensors, which may be column slices. The second
  // result then has no elements.
  m.def(
      "_selective_scan_bwd_out(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, "
      "Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, Tensor chunk_states, str discretization, bool delta_softplus, "
      "bool[9] needs_grad, Tensor(a!) grad_z, Tensor(b!)? grad_delta=None) "
      "-> (Tensor grad_u, Tensor, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_delta_bias, Tensor "
      "grad_initial_state)",
      tags);

  // One step of the scan, the state updated in place.
  m.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None, *, "
      "str discretization='zoh', float[]? dt_limit=None, bool A_is_log=False) -> Tensor",
      tags);

  // The scan in chunks (SSD, Mamba-2), which mamba_ssm calls mamba_chunk_scan_combined: S_t = e^zeta_t S_{t-1} + d_t k(zeta_t)
  // x_t B_t^T with zeta = d A, one A for a head; out = (S C + D x) silu(z). dt_limit absent: no limits, as in
  // selective_state_update; the Python function's default is (0, inf). chunk_size is a hint.
  m.def(
      "ssd_chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *, SymInt? chunk_size=None, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float[]? dt_limit=None, Tensor? initial_states=None, "
      "Tensor? seq_idx=None, Tensor? cu_seqlens=None, str discretization='zoh') -> (Tensor out, Tensor final_states)",
      tags);
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone.
  for (const char* name : {"_ssd_chunk_scan", "_ssd_chunk_scan_fwd"}) {
    const std::string arguments =
        "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, SymInt? chunk_size, Tensor? D, Tensor? z, Tensor? dt_bias, "
        "bool dt_softplus, float dt_min, float dt_max, Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, "
        "str discretization) -> (Tensor out, Tensor final_states)";
    m.def((name + arguments).c_str(), tags);
  }
  // Its adjoint, which recomputes what it needs of forward. Gradients that are absent or not needed have no elements.
  m.def(
      "_ssd_chunk_scan_bwd(Tensor? grad_out, Tensor? grad_final_states, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "SymInt? chunk_size, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max, "
      "Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, str discretization, bool[9] needs_grad) "
      "-> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_z, "
      "Tensor grad_dt_bias, Tensor grad_initial_states)",
      tags);

  // Depthwise convolution over the last `width` steps: act(bias + sum_l weight[:, width - 1 - l] x_{t-l}).
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
      tags);
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone.
  for (const char* name : {"_causal_conv1d", "_causal_conv1d_fwd"}) {
    const std::string arguments =
        "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_state, "
        "str? activation) -> (Tensor out, Tensor final_state)";
    m.def((name + arguments).c_str(), tags);
  }
  // Its adjoint. Gradients that are absent or not needed have no elements; the last of needs_grad is of initial_state. The
  // second form writes the first gradient where it is told to: into columns of a wider tensor, for instance.
  m.def(
      "_causal_conv1d_bwd(Tensor? grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, "
      "Tensor? cu_seqlens, Tensor? initial_state, str? activation, bool[4] needs_grad) "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_initial_state)",
      tags);
  m.def(
      "_causal_conv1d_bwd_out(Tensor? grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_state, str? activation, bool[4] needs_grad, Tensor(a!) grad_x, "
      "Tensor? grad_out_2=None) -> (Tensor grad_weight, Tensor grad_bias, Tensor grad_initial_state)",
      tags);
  // A step of it or a few, the state rolled in place.
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, str? activation=None, "
      "Tensor? state_batch_indices=None) -> Tensor",
      tags);

  // -e^A_log and the other parameters in the accumulation type, one after another in one tensor: one kernel on a GPU.
  m.def("_mixer_parameters(Tensor A_log, Tensor? bias, Tensor? D, ScalarType dtype) -> Tensor", tags);
  // The convolution of a Mamba mixer, with SiLU, on the left half of the columns: x twice, with a gradient each, and the right
  // half. mixers/mamba_conv_op.cpp says why.
  m.def("_mamba_conv(Tensor xz, Tensor weight, Tensor? bias, Tensor? initial_state) -> (Tensor, Tensor, Tensor z)", tags);

  // The selective scan between the projections of a Mamba mixer, of (batch, seqlen, ...) sequences: A = -e^A_log, and a
  // softplus on delta. Forward alone also returns what it saves for backward: the last is of _mixer_parameters.
  const std::string scan_arguments =
      "Tensor x, Tensor delta, Tensor A_log, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, ";
  m.def(("_mamba_mixer(" + scan_arguments + "Tensor? initial_state, str discretization) -> (Tensor out, Tensor last_state)")
            .c_str(),
        tags);
  m.def(("_mamba_mixer_fwd(" + scan_arguments +
         "Tensor? initial_state, str discretization, bool save_chunk_states) "
         "-> (Tensor out, Tensor last_state, Tensor chunk_states, Tensor parameters)")
            .c_str(),
        tags);
  m.def(
      ("_mamba_mixer_bwd(Tensor? grad_out, Tensor? grad_last_state, " + scan_arguments +
       "Tensor chunk_states, Tensor parameters, str discretization, bool[9] needs_grad) -> (Tensor grad_x, Tensor grad_delta, "
       "Tensor grad_A_log, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, "
       "Tensor grad_initial_state)")
          .c_str(),
      tags);

  // What stands between the projections of a Mamba-2 mixer: convolution, scan and gated norm. mixers/mamba2_mixer_op.cpp
  // has the formulas. Forward alone also returns what it saves for backward.
  const std::string mixer_arguments =
      "Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor? D, Tensor dt_bias, Tensor? norm_weight, "
      "Tensor? conv_state, Tensor? ssm_state, Tensor? seq_idx, Tensor? cu_seqlens, int headdim, int ngroups, int dstate, "
      "SymInt? chunk_size, float dt_min, float dt_max, float eps, bool norm_before_gate, str discretization) -> ";
  const std::string mixer_results = "(Tensor out, Tensor final_conv_state, Tensor final_ssm_state";
  m.def(("_mamba2_mixer(" + mixer_arguments + mixer_results + ")").c_str(), tags);
  m.def(("_mamba2_mixer_fwd(" + mixer_arguments + mixer_results + ", Tensor y, Tensor rstd, Tensor parameters)").c_str(), tags);
  m.def(("_mamba2_mixer_bwd(Tensor? grad_out, Tensor? grad_final_conv_state, Tensor? grad_final_ssm_state, Tensor y, "
         "Tensor rstd, Tensor parameters, bool[9] needs_grad, " +
         mixer_arguments +
         "(Tensor grad_projected, Tensor grad_conv_weight, Tensor grad_conv_bias, Tensor grad_A_log, Tensor grad_D, "
         "Tensor grad_dt_bias, Tensor grad_norm_weight, Tensor grad_conv_state, Tensor grad_ssm_state)")
            .c_str(),
        tags);

  // The family of h_t = a_t h_{t-1} + b_t: linear_scan and linear_step, mingru_scan and mingru_step, ..., a scan and a step of
  // it for each row of common/recurrences.h.
  for (const ssm_kernels::linear_scan::PublicOperator& op : ssm_kernels::linear_scan::public_operators()) {
    m.def(op.schema().c_str(), tags);
  }
  // Any of them, by name, a step with an axis of time of size 1; what does not matter to it is ignored.
  m.def(
      "_linear_recurrence(Tensor[] inputs, Tensor? h0, Tensor? cu_seqlens, str recurrence, str candidate_activation, "
      "bool gate_is_logit, bool reverse) -> (Tensor h, Tensor last_state)",
      tags);
  m.def(
      "_linear_recurrence_fwd(Tensor[] inputs, Tensor? h0, Tensor? cu_seqlens, str recurrence, str candidate_activation, "
      "bool gate_is_logit, bool reverse) -> (Tensor h, Tensor last_state)",
      tags);
  // Its adjoint. Gradients that are not needed have no elements; the last of needs_grad is of h0.
  m.def(
      "_linear_recurrence_bwd(Tensor? grad_h, Tensor? grad_last_state, Tensor[] inputs, Tensor h, Tensor? h0, "
      "Tensor? cu_seqlens, str recurrence, str candidate_activation, bool gate_is_logit, bool reverse, bool[5] needs_grad) "
      "-> (Tensor[] grad_inputs, Tensor grad_h0)",
      tags);

  // Norms, of groups of columns, with a gate or with a residual; norm/norm.h has the formulas.
  for (const char* name : {"rms_norm_gated", "layer_norm_gated"}) {
    const std::string arguments =
        "(Tensor x, Tensor? weight, Tensor? z=None, Tensor? bias=None, *, float eps=1e-05, SymInt? group_size=None, "
        "bool norm_before_gate=False, str activation='silu') -> Tensor";
    m.def((name + arguments).c_str(), tags);
  }
  for (const char* name : {"add_rms_norm", "add_layer_norm"}) {
    const std::string arguments =
        "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias=None, *, float eps=1e-05, bool residual_in_fp32=False) "
        "-> (Tensor normed, Tensor new_residual)";
    m.def((name + arguments).c_str(), tags);
  }
  // Both norms, differentiable; and forward alone, with rstd and mean of each row's groups. RMSNorm's mean has no elements.
  const std::string gated_arguments =
      "(Tensor x, Tensor? weight, Tensor? z, Tensor? bias, float eps, SymInt? group_size, bool norm_before_gate, "
      "str activation, bool subtract_mean) -> ";
  m.def(("_norm_gated" + gated_arguments + "Tensor").c_str(), tags);
  m.def(("_norm_gated_fwd" + gated_arguments + "(Tensor out, Tensor rstd, Tensor mean)").c_str(), tags);
  // Its adjoint. Gradients that are absent or not needed have no elements; needs_grad: x, weight, z, bias.
  const std::string gated_bwd_arguments =
      "(Tensor grad_out, Tensor x, Tensor? weight, Tensor? z, Tensor? bias, Tensor mean, Tensor rstd, SymInt? group_size, "
      "bool norm_before_gate, str activation, bool subtract_mean, ";
  m.def(("_norm_gated_bwd" + gated_bwd_arguments +
         "bool[4] needs_grad) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_z, Tensor grad_bias)")
            .c_str(),
        tags);
  // The same into buffers, which may be column slices of wider tensors. needs_grad: weight, bias.
  m.def(("_norm_gated_bwd_out" + gated_bwd_arguments +
         "bool[2] needs_grad, Tensor(a!)? grad_x, Tensor(b!)? grad_z) -> (Tensor grad_weight, Tensor grad_bias)")
            .c_str(),
        tags);
  const std::string add_arguments =
      "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, SymInt? group_size, bool residual_in_fp32, "
      "bool subtract_mean) -> (Tensor normed, Tensor new_residual";
  m.def(("_add_norm" + add_arguments + ")").c_str(), tags);
  m.def(("_add_norm_fwd" + add_arguments + ", Tensor rstd, Tensor mean)").c_str(), tags);
  // grad_residual has the accumulation type; a residual in the dtype of x has the gradient of x. needs_grad: x, residual,
  // weight, bias.
  m.def(
      "_add_norm_bwd(Tensor grad_normed, Tensor? grad_new_residual, Tensor new_residual, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, SymInt? group_size, bool subtract_mean, bool[4] needs_grad) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
      tags);
}

namespace {

torch::CppFunction refusal() { return torch::CppFunction::makeFromBoxedFunction<&ssm_kernels::no_kernel>(); }

// Operators with kernels for each device that autograd does not look into.
constexpr const char* kDeviceOperators[] = {
    "_selective_scan_fwd", "_selective_scan_bwd",    "_selective_scan_bwd_out", "_ssd_chunk_scan_fwd",
    "_ssd_chunk_scan_bwd", "_linear_recurrence_fwd", "_linear_recurrence_bwd",  "_causal_conv1d_fwd",
    "_causal_conv1d_bwd",  "_causal_conv1d_bwd_out", "_norm_gated_fwd",         "_norm_gated_bwd",
    "_norm_gated_bwd_out", "_add_norm_fwd",          "_add_norm_bwd",           "_mixer_parameters",
};

// Compositions of other operators that autograd does not look into.
constexpr const char* kComposedOperators[] = {"_mamba_mixer_fwd", "_mamba_mixer_bwd", "_mamba2_mixer_fwd", "_mamba2_mixer_bwd"};

}  // namespace

// Adjoints are not differentiable: an error takes the place of wrong second derivatives.
TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  for (const char* name : kDeviceOperators) m.impl(name, torch::autograd::autogradNotImplementedFallback());
  for (const char* name : kComposedOperators) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

#ifndef SSM_KERNELS_WITH_CUDA
TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  const auto missing = [] { return torch::CppFunction::makeFromBoxedFunction<&ssm_kernels::built_without_cuda>(); };
  for (const char* name : kDeviceOperators) m.impl(name, missing());
  for (const char* name : {"selective_state_update", "causal_conv1d_update"}) m.impl(name, missing());
}
#endif

// Kernels of public operators for sparse, nested and undefined tensors in inference mode, where no Autograd kernel checks them:
// they raise. Operators with a composite kernel need none.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("selective_state_update", refusal());
  m.impl("causal_conv1d_update", refusal());
}

TORCH_LIBRARY_IMPL(ssm_kernels, NestedTensorCPU, m) {
  m.impl("selective_scan", refusal());
  m.impl("selective_state_update", refusal());
  m.impl("causal_conv1d_update", refusal());
}

TORCH_LIBRARY_IMPL(ssm_kernels, NestedTensorCUDA, m) {
  m.impl("selective_scan", refusal());
  m.impl("selective_state_update", refusal());
  m.impl("causal_conv1d_update", refusal());
}
