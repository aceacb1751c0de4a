// The schema of every operator, and the kernels that are the same for all. The others are registered in the operator's folder:
// Autograd, Autocast and Meta by <operator>_op.cpp, the devices' by cpu/entry.cpp and cuda/entry.cpp, or by <operator>_op.cpp
// if one function serves both devices.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "linear_scan/linear_scan_op.h"
#include "torch/arguments.h"
#include "torch/batched_gradients.h"
#include "torch/not_differentiable.h"

namespace {

using namespace ssm_kernels;

template <c10::KernelFunction::BoxedKernelFunction* function>
void implement_boxed(torch::Library& m, const std::string& name, at::DispatchKey key) {
  m.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<function>()));
}

std::string name_of(const std::string& schema) { return schema.substr(0, schema.find('(')); }

// Raises an error for CUDA tensors in a build without CUDA kernels.
void refuse_missing_cuda([[maybe_unused]] torch::Library& m, [[maybe_unused]] const std::string& name) {
#ifndef SSM_KERNELS_WITH_CUDA
  implement_boxed<&built_without_cuda>(m, name, at::DispatchKey::CUDA);
#endif
}

}  // namespace

TORCH_LIBRARY(ssm_kernels, m) {
  const auto def = [&](const std::string& schema) { m.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); };
  // Operators that autograd does not look into. Their adjoints are not differentiable: an error takes the place of wrong second
  // derivatives.
  const auto def_below_autograd = [&](const std::string& schema) {
    def(schema);
    if (schema.find("!)") != std::string::npos) {  // writes to an argument, which takes no part in a graph
      m.impl(name_of(schema).c_str(),
             torch::dispatch(at::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
    } else {
      m.impl(name_of(schema).c_str(),
             torch::dispatch(at::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&below_autograd>()));
    }
  };
  // Schemas of operators that have kernels for each device.
  const auto def_kernels = [&](const std::string& schema) {
    def_below_autograd(schema);
    refuse_missing_cuda(m, name_of(schema));
  };

  // Sets a process-wide option of torch/debug_options.h and returns its previous value. For tests and measurements.
  def("_set_debug_option(str name, int value) -> int");

  // The values of `discretization`, and the other names of some of them.
  def("_discretizations() -> str[]");
  def("_discretization_aliases() -> Dict(str, str)");

  // The rows of common/recurrences.h: scans, inputs, the first input that broadcasts, options.
  def("_recurrences() -> (str[] names, str[][] inputs, int[] first_broadcast, str[][] options)");

  // "; did you mean 'zoh'?" for the choice nearest to a misspelt name, or "".
  def("_nearest_choice(str given, str[] choices) -> str");

  // Selective scan: h_t = Abar(z_t) h_{t-1} + delta_t k(z_t) B_t u_t with z = delta A; out = (<C, h> + D u) silu(z). With
  // reverse, h_t follows from h_{t+1}.
  def("selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? delta_bias=None, Tensor? initial_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, *, "
      "str discretization='zoh', bool delta_softplus=False, bool reverse=False) -> (Tensor out, Tensor last_state)");
  // The scan, and the state at each chunk boundary, from which backward recomputes the states inside it.
  def_kernels(
      "_selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, str discretization, bool delta_softplus, bool save_chunk_states, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, bool reverse=False) -> (Tensor out, Tensor last_state, Tensor chunk_states)");
  // The kernels that forward and backward of a call take, "name, channels of a block, segments and spans of time". For tests.
  def_kernels(
      "_selective_scan_plan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, str discretization, bool delta_softplus, Tensor? seq_idx=None, Tensor? cu_seqlens=None, "
      "bool reverse=False) -> (str forward, str backward)");
  // The scan's adjoint. Gradients that are absent or not needed have no elements; the last of needs_grad is of initial_state,
  // an argument of packed calls: chunk_states have that of others.
  def_kernels(
      "_selective_scan_bwd(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor chunk_states, str discretization, bool delta_softplus, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool reverse, bool[9] needs_grad) "
      "-> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
      "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state)");
  // The same for the last reader of chunk_states, which may lose their values.
  def_kernels(
      "_selective_scan_bwd_last(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor "
      "C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor(a!) chunk_states, str discretization, bool delta_softplus, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool reverse, bool[9] needs_grad) "
      "-> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
      "Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, Tensor grad_initial_state)");
  // As _selective_scan_bwd, but writes grad_z, and grad_delta if given, into the caller's tensors, which may be column slices.
  // The second result then has no elements. chunk_states lose their values only with reuses_chunk_states. `out` receives the
  // outputs of forward; a copy of grad_out precedes them unless it is the memory of grad_out.
  def_kernels(
      "_selective_scan_bwd_out(Tensor? grad_out, Tensor? grad_last_state, Tensor u, Tensor delta, Tensor A, Tensor B, "
      "Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, Tensor(c!) chunk_states, str discretization, bool delta_softplus, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool reverse, bool[9] needs_grad, Tensor(a!) grad_z, "
      "Tensor(b!)? grad_delta=None, bool reuses_chunk_states=False, Tensor(d!)? out=None) "
      "-> (Tensor grad_u, Tensor, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_delta_bias, Tensor "
      "grad_initial_state)");

  // The summary of a span of steps: the last state from zero, and the product of all Abar. Forward alone, and its adjoint.
  def("selective_scan_summary(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor? delta_bias=None, *, "
      "str discretization='zoh', bool delta_softplus=False) -> (Tensor last_state, Tensor decay)");
  const std::string scan_summary_arguments =
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor? delta_bias, str discretization, bool delta_softplus";
  def_kernels("_selective_scan_summary_fwd(" + scan_summary_arguments + ") -> (Tensor last_state, Tensor decay)");
  def_kernels("_selective_scan_summary_bwd(Tensor? grad_last_state, Tensor? grad_decay, " + scan_summary_arguments +
              ", bool[5] needs_grad) -> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor "
              "grad_delta_bias)");
  // The gradient of the state before a span, from the gradients of <C, h> silu(z): sum over t of (product of Abar up to t) C_t
  // grad_out_t silu(z_t).
  def_kernels(
      "_selective_scan_initial_gradient(Tensor grad_out, Tensor delta, Tensor A, Tensor C, Tensor? z, Tensor? delta_bias, "
      "str discretization, bool delta_softplus) -> Tensor");

  // One step of the scan, the state updated in place.
  def("selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None, *, "
      "str discretization='zoh', float[]? dt_limit=None, bool A_is_log=False) -> Tensor");
  refuse_missing_cuda(m, "selective_state_update");
  // The same for servers: into `out`, several tokens a row, slots to read from and slots to write to.
  def("selective_state_update_out(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, str discretization, float[]? dt_limit, bool A_is_log, "
      "Tensor(b!) out, Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, Tensor? num_accepted_tokens=None, "
      "Tensor? cu_seqlens=None, Tensor(c!)? intermediate_states_buffer=None, Tensor? intermediate_state_indices=None, "
      "bool disable_state_update=False) -> ()");
  refuse_missing_cuda(m, "selective_state_update_out");

  // The scan in chunks (SSD, Mamba-2), which mamba_ssm calls mamba_chunk_scan_combined: S_t = e^zeta_t S_{t-1} + d_t k(zeta_t)
  // x_t B_t^T with zeta = d A, one A for a head; out = (S C + D x) silu(z). With reverse, S_t follows from S_{t+1}. dt_limit
  // absent: no limits, as in selective_state_update; the Python function's default is (0, inf). chunk_size is a hint.
  def("ssd_chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *, SymInt? chunk_size=None, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float[]? dt_limit=None, Tensor? initial_states=None, "
      "Tensor? seq_idx=None, Tensor? cu_seqlens=None, str discretization='zoh', bool reverse=False) "
      "-> (Tensor out, Tensor final_states)");
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone. Also, for tests, the kernel
  // that a call takes: "kernel=<aten, short, sm80 or sm90> products=... chunk=..." and how the work is divided.
  const std::string ssd_arguments =
      "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, SymInt? chunk_size, Tensor? D, Tensor? z, Tensor? dt_bias, "
      "bool dt_softplus, float dt_min, float dt_max, Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, "
      "str discretization, bool reverse";
  const std::string ssd_results = ") -> (Tensor out, Tensor final_states)";
  def("_ssd_chunk_scan" + ssd_arguments + ssd_results);
  def_kernels("_ssd_chunk_scan_fwd" + ssd_arguments + ssd_results);
  def("_ssd_chunk_scan_plan" + ssd_arguments + ", bool is_backward) -> str");
  // Its adjoint, which recomputes what it needs of forward. Gradients that are absent or not needed have no elements.
  const std::string ssd_inputs = ssd_arguments.substr(1);
  const std::string ssd_gradients =
      ", bool[9] needs_grad) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D, "
      "Tensor grad_z, Tensor grad_dt_bias, Tensor grad_initial_states)";
  def_kernels("_ssd_chunk_scan_bwd(Tensor? grad_out, Tensor? grad_final_states, " + ssd_inputs + ssd_gradients);
  // The scan of sequences that are not packed, not in reverse, and the states after so many steps, ascending. On CUDA forward
  // takes the kernels of the scan; backward is matmuls on any device.
  const std::string ssd_states = ", int[] states_at) -> (Tensor out, Tensor final_states, Tensor states)";
  def("_ssd_chunk_scan_states" + ssd_arguments + ssd_states);
  def_kernels("_ssd_chunk_scan_states_fwd" + ssd_arguments + ssd_states);
  def_kernels("_ssd_chunk_scan_states_bwd(Tensor? grad_out, Tensor? grad_final_states, Tensor? grad_states, " + ssd_inputs +
              ", int[] states_at" + ssd_gradients);

  // The summary of a span of steps: the final states from zero, and the decay e^(sum of zeta), zero where a sequence begins.
  // The same with all arguments positional, forward alone, and its adjoint.
  const std::string ssd_summary_results = " -> (Tensor final_states, Tensor decay)";
  def("ssd_chunk_scan_summary(Tensor x, Tensor dt, Tensor A, Tensor B, *, Tensor? dt_bias=None, bool dt_softplus=False, "
      "float[]? dt_limit=None, str discretization='zoh', Tensor? seq_idx=None)" +
      ssd_summary_results);
  const std::string ssd_summary_arguments =
      "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max, "
      "Tensor? seq_idx, str discretization";
  def("_ssd_chunk_scan_summary(" + ssd_summary_arguments + ")" + ssd_summary_results);
  def_kernels("_ssd_chunk_scan_summary_fwd(" + ssd_summary_arguments + ")" + ssd_summary_results);
  def_kernels("_ssd_chunk_scan_summary_bwd(Tensor? grad_final_states, Tensor? grad_decay, " + ssd_summary_arguments +
              ", bool[5] needs_grad) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_dt_bias)");
  // The gradient of the states before a span, from the gradients of S C: sum over t of e^(sum of zeta up to t) grad_out_t
  // C_t^T, over the steps of the first sequence.
  def_kernels(
      "_ssd_chunk_scan_initial_gradient(Tensor grad_out, Tensor dt, Tensor A, Tensor C, Tensor? dt_bias, bool dt_softplus, "
      "float dt_min, float dt_max, Tensor? seq_idx, str discretization) -> Tensor");

  // Depthwise convolution over the last `width` steps: act(bias + sum_l weight[:, width - 1 - l] x_{t-l}).
  def("causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, Tensor? initial_state=None) -> (Tensor out, Tensor final_state)");
  // The same with all arguments positional, as vmap wants them: differentiable; and forward alone.
  const std::string convolution_arguments =
      "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_state, "
      "str? activation) -> (Tensor out, Tensor final_state)";
  def("_causal_conv1d" + convolution_arguments);
  def_kernels("_causal_conv1d_fwd" + convolution_arguments);
  // Its adjoint. Gradients that are absent or not needed have no elements; the last of needs_grad is of initial_state. The
  // second form writes the first gradient where it is told to: into columns of a wider tensor, for instance.
  def_kernels(
      "_causal_conv1d_bwd(Tensor? grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, "
      "Tensor? cu_seqlens, Tensor? initial_state, str? activation, bool[4] needs_grad, str layer='causal_conv1d') "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_initial_state)");
  def_kernels(
      "_causal_conv1d_bwd_out(Tensor? grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_state, str? activation, bool[4] needs_grad, Tensor(a!) grad_x, "
      "Tensor? grad_out_2=None) -> (Tensor grad_weight, Tensor grad_bias, Tensor grad_initial_state)");
  // A step of it or a few, the state rolled in place.
  def("causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, str? activation=None, "
      "Tensor? state_batch_indices=None) -> Tensor");
  refuse_missing_cuda(m, "causal_conv1d_update");
  // The same for servers: into `out`, packed tokens, slots to read from and slots to write to.
  def("causal_conv1d_update_out(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, "
      "Tensor? state_batch_indices, Tensor(b!) out, Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, "
      "Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None, Tensor(c!)? intermediate_conv_window=None, "
      "Tensor? intermediate_state_indices=None, bool disable_state_update=False) -> ()");
  refuse_missing_cuda(m, "causal_conv1d_update_out");

  // -e^A_log and the other parameters in the accumulation type, one after another in one tensor: one kernel on a GPU.
  def_kernels("_mixer_parameters(Tensor A_log, Tensor? bias, Tensor? D, ScalarType dtype) -> Tensor");
  // A contiguous copy of the first columns of a tensor, or of all and columns of zeros behind them.
  def_kernels("_copy_rows(Tensor source, SymInt columns) -> Tensor");
  // The convolution of a Mamba mixer, with SiLU, on the left half of the columns: x twice, with a gradient each, and the right
  // half. mixers/mamba_conv_op.cpp says why. Errors about double backward name `layer`.
  def("_mamba_conv(Tensor xz, Tensor weight, Tensor? bias, Tensor? initial_state, str layer='Mamba') "
      "-> (Tensor, Tensor, Tensor z)");

  // The selective scan between the projections of a Mamba mixer, of (batch, seqlen, ...) sequences: A = -e^A_log, and a
  // softplus on delta. Forward alone also returns what it saves for backward: the last is of _mixer_parameters. Errors about
  // double backward name `layer`.
  const std::string scan_arguments =
      "Tensor x, Tensor delta, Tensor A_log, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, ";
  def("_mamba_mixer(" + scan_arguments +
      "Tensor? initial_state, str discretization, Tensor? seq_idx=None, Tensor? cu_seqlens=None, str layer='Mamba') "
      "-> (Tensor out, Tensor last_state)");
  def_below_autograd("_mamba_mixer_fwd(" + scan_arguments +
                     "Tensor? initial_state, str discretization, bool save_chunk_states, Tensor? seq_idx=None, "
                     "Tensor? cu_seqlens=None) -> (Tensor out, Tensor last_state, Tensor chunk_states, Tensor parameters)");
  def_below_autograd(
      "_mamba_mixer_bwd(Tensor? grad_out, Tensor? grad_last_state, " + scan_arguments +
      "Tensor chunk_states, Tensor parameters, str discretization, bool[9] needs_grad, Tensor? initial_state=None, "
      "Tensor? seq_idx=None, Tensor? cu_seqlens=None, str layer='Mamba') -> (Tensor grad_x, Tensor grad_delta, "
      "Tensor grad_A_log, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, "
      "Tensor grad_initial_state)");

  // The Mamba mixer from the in-projection's output to the layer's, with the other projections: mixers/mamba_inner_op.cpp. Of
  // what backward needs, recompute="cheap" keeps xz, the output of x_proj and the chunk states, "all" no chunk states.
  def("_mamba_inner(Tensor xz, Tensor conv_weight, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj, Tensor? delta_bias, "
      "Tensor A_log, Tensor? D, Tensor out_proj, Tensor? out_bias, Tensor? conv_state, Tensor? ssm_state, Tensor? seq_idx, "
      "Tensor? cu_seqlens, str discretization, str recompute='cheap', str layer='Mamba') -> (Tensor out, Tensor last_state)");

  // The Mamba-2 mixer between its projections: convolution, scan and gated norm. mixers/mamba2_mixer_op.cpp
  // has the formulas. Forward alone also returns what it saves for backward.
  const std::string mixer_arguments =
      "Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor? D, Tensor dt_bias, Tensor? norm_weight, "
      "Tensor? conv_state, Tensor? ssm_state, Tensor? seq_idx, Tensor? cu_seqlens, int headdim, int ngroups, int dstate, "
      "SymInt? chunk_size, float dt_min, float dt_max, float eps, bool norm_before_gate, str discretization";
  const std::string mixer_results = ") -> (Tensor out, Tensor final_conv_state, Tensor final_ssm_state";
  def("_mamba2_mixer(" + mixer_arguments + ", str layer='Mamba2'" + mixer_results + ")");
  // Without applies_norm, `out` is y, before the gate and a norm whose groups continue on other devices; the results y and rstd
  // are empty.
  def_below_autograd("_mamba2_mixer_fwd(" + mixer_arguments + ", bool applies_norm=True" + mixer_results +
                     ", Tensor y, Tensor rstd, Tensor parameters)");
  // norm_mean_product is mean_product of _norm_gated_bwd.
  def_below_autograd(
      "_mamba2_mixer_bwd(Tensor? grad_out, Tensor? grad_final_conv_state, Tensor? grad_final_ssm_state, Tensor y, "
      "Tensor rstd, Tensor parameters, bool[9] needs_grad, " +
      mixer_arguments +
      ", Tensor? norm_mean_product=None, str layer='Mamba2') -> (Tensor grad_projected, Tensor grad_conv_weight, Tensor "
      "grad_conv_bias, "
      "Tensor grad_A_log, Tensor grad_D, Tensor grad_dt_bias, Tensor grad_norm_weight, Tensor grad_conv_state, "
      "Tensor grad_ssm_state)");
  // The same with the out-projection, if its weight is given, and without y among what backward keeps.
  const std::string projected_arguments =
      mixer_arguments +
      ", Tensor? out_proj_weight, Tensor? out_proj_bias, bool recomputes_scan, str layer='Mamba2', bool casts_projection=False";
  def("_mamba2_mixer_projected(" + projected_arguments + mixer_results + ")");
  def_below_autograd("_mamba2_mixer_projected_fwd(" + projected_arguments + mixer_results +
                     ", Tensor y, Tensor rstd, Tensor parameters)");
  def_below_autograd(
      "_mamba2_mixer_projected_bwd(Tensor? grad_out, Tensor? grad_final_conv_state, Tensor? grad_final_ssm_state, Tensor y, "
      "Tensor rstd, Tensor parameters, bool[11] needs_grad, " +
      projected_arguments +
      ") -> (Tensor grad_projected, Tensor grad_conv_weight, Tensor grad_conv_bias, Tensor grad_A_log, "
      "Tensor grad_D, Tensor grad_dt_bias, Tensor grad_norm_weight, Tensor grad_conv_state, Tensor grad_ssm_state, "
      "Tensor grad_out_proj_weight, Tensor grad_out_proj_bias)");

  // The family of h_t = a_t h_{t-1} + b_t: linear_scan, linear_step and linear_scan_summary, mingru_scan, ..., a scan, a step
  // of it and its summary for each row of common/recurrences.h.
  for (const linear_scan::PublicOperator& op : linear_scan::public_operators()) {
    def(op.schema());
  }
  // Any of them, by name, a step with an axis of time of size 1; what does not matter to it is ignored.
  def("_linear_recurrence(Tensor[] inputs, Tensor? h0, Tensor? cu_seqlens, Tensor? reset, str recurrence, "
      "str candidate_activation, bool gate_is_logit, bool reverse) -> (Tensor h, Tensor last_state)");
  def_kernels(
      "_linear_recurrence_fwd(Tensor[] inputs, Tensor? h0, Tensor? cu_seqlens, Tensor? reset, str recurrence, "
      "str candidate_activation, bool gate_is_logit, bool reverse) -> (Tensor h, Tensor last_state)");
  // Its adjoint. Gradients that are not needed have no elements; the last of needs_grad is of h0.
  def_kernels(
      "_linear_recurrence_bwd(Tensor? grad_h, Tensor? grad_last_state, Tensor[] inputs, Tensor h, Tensor? h0, "
      "Tensor? cu_seqlens, Tensor? reset, str recurrence, str candidate_activation, bool gate_is_logit, bool reverse, "
      "bool[5] needs_grad) -> (Tensor grad_0, Tensor grad_1, Tensor grad_2, Tensor grad_3, Tensor grad_h0)");
  // The summary of any of them: the last state from zero, and the product of all a, zero where a reset is. And its adjoint.
  const std::string summary_arguments =
      "Tensor[] inputs, Tensor? cu_seqlens, Tensor? reset, str recurrence, str candidate_activation, bool gate_is_logit, "
      "bool reverse";
  def("_linear_recurrence_summary(" + summary_arguments + ") -> (Tensor last_state, Tensor decay)");
  def_kernels("_linear_recurrence_summary_fwd(" + summary_arguments + ") -> (Tensor last_state, Tensor decay)");
  def_kernels("_linear_recurrence_summary_bwd(Tensor? grad_last_state, Tensor? grad_decay, " + summary_arguments +
              ", bool[4] needs_grad) -> (Tensor grad_0, Tensor grad_1, Tensor grad_2, Tensor grad_3)");

  for (const char* name :
       {"_linear_recurrence", "_linear_recurrence_bwd", "_linear_recurrence_summary", "_linear_recurrence_summary_bwd"}) {
    implement_boxed<&call_each_sample>(m, name, at::DispatchKey::Batched);
  }

  // Norms, of groups of columns, with a gate or with a residual; norm/norm.h has the formulas.
  for (const std::string name : {"rms_norm_gated", "layer_norm_gated"}) {
    def(name +
        "(Tensor x, Tensor? weight, Tensor? z=None, Tensor? bias=None, *, float eps=1e-05, SymInt? group_size=None, "
        "bool norm_before_gate=False, str activation='silu') -> Tensor");
  }
  for (const std::string name : {"add_rms_norm", "add_layer_norm"}) {
    def(name +
        "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias=None, *, float eps=1e-05, bool residual_in_fp32=False) "
        "-> (Tensor normed, Tensor new_residual)");
  }
  // Both norms, differentiable; and forward alone, with rstd and mean of each row's groups. RMSNorm's mean has no elements.
  const std::string gated_arguments =
      "(Tensor x, Tensor? weight, Tensor? z, Tensor? bias, float eps, SymInt? group_size, bool norm_before_gate, "
      "str activation, bool subtract_mean";
  def("_norm_gated" + gated_arguments + ") -> Tensor");
  // mean_square, (rows, groups) in the accumulation type, takes the place of the mean over a group of v^2.
  def_kernels("_norm_gated_fwd" + gated_arguments + ", Tensor? mean_square=None) -> (Tensor out, Tensor rstd, Tensor mean)");
  // Its adjoint. Gradients that are absent or not needed have no elements; needs_grad: x, weight, z, bias. mean_product takes
  // the place of the mean over a group of gy weight y.
  const std::string gated_bwd_arguments =
      "(Tensor grad_out, Tensor x, Tensor? weight, Tensor? z, Tensor? bias, Tensor mean, Tensor rstd, SymInt? group_size, "
      "bool norm_before_gate, str activation, bool subtract_mean, ";
  def_kernels("_norm_gated_bwd" + gated_bwd_arguments +
              "bool[4] needs_grad, Tensor? mean_product=None) -> "
              "(Tensor grad_x, Tensor grad_weight, Tensor grad_z, Tensor grad_bias)");
  // The same into buffers, which may be column slices of wider tensors. needs_grad: weight, bias. `out` gets the
  // result of _norm_gated_fwd with `eps` once more, with the same bits.
  def_kernels("_norm_gated_bwd_out" + gated_bwd_arguments +
              "bool[2] needs_grad, Tensor(a!)? grad_x, Tensor(b!)? grad_z, Tensor? mean_product=None, "
              "Tensor(c!)? out=None, float eps=0) -> (Tensor grad_weight, Tensor grad_bias)");
  // For an RMSNorm whose groups are on several devices: the sums, (rows, groups) in the accumulation type, of v^2 and of
  // gy weight y. The z of the first is a gate before the norm.
  def_kernels("_norm_gated_squares(Tensor x, Tensor? z, SymInt? group_size, str activation) -> Tensor");
  def_kernels(
      "_norm_gated_products(Tensor grad_out, Tensor x, Tensor? weight, Tensor? z, Tensor rstd, SymInt? group_size, "
      "bool norm_before_gate, str activation) -> Tensor");
  const std::string add_arguments =
      "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, SymInt? group_size, bool residual_in_fp32, "
      "bool subtract_mean) -> (Tensor normed, Tensor new_residual";
  def("_add_norm" + add_arguments + ")");
  def_kernels("_add_norm_fwd" + add_arguments + ", Tensor rstd, Tensor mean)");
  // grad_residual has the accumulation type; a residual in the dtype of x has the gradient of x. needs_grad: x, residual,
  // weight, bias.
  def_kernels(
      "_add_norm_bwd(Tensor grad_normed, Tensor? grad_new_residual, Tensor new_residual, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, SymInt? group_size, bool subtract_mean, bool[4] needs_grad) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)");

  // Public operators raise an error for sparse, nested and undefined tensors in inference mode too, where no Autograd kernel
  // checks them. Operators with a composite kernel need no such kernel.
  const auto refuse = [&](const char* name, at::DispatchKey key) { implement_boxed<&no_kernel>(m, name, key); };
  for (const char* name : {"selective_scan", "selective_scan_summary", "selective_state_update", "selective_state_update_out",
                           "causal_conv1d_update", "causal_conv1d_update_out"}) {
    refuse(name, at::DispatchKey::NestedTensorCPU);
    refuse(name, at::DispatchKey::NestedTensorCUDA);
  }
  refuse("selective_state_update", at::DispatchKey::CompositeExplicitAutograd);
  refuse("selective_state_update_out", at::DispatchKey::CompositeExplicitAutograd);
  refuse("causal_conv1d_update", at::DispatchKey::CompositeExplicitAutograd);
  refuse("causal_conv1d_update_out", at::DispatchKey::CompositeExplicitAutograd);
}
