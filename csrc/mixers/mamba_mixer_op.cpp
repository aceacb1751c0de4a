// The selective scan of a Mamba mixer as one differentiable operator, on every device. It takes (batch, seqlen, ...) tensors as
// the projections return them, computes A = -e^A_log and applies softplus to delta.
//
// The operator also does the transposes, so that a call of the layer adds one autograd node here. The node saves the inputs,
// the chunk states and the converted parameters; the initial state for packed sequences only, as it is the first of the chunk
// states of others.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "mixers/mamba_conv_op.h"
#include "mixers/mamba_scan.h"
#include "mixers/mixer_parameters_op.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/eager.h"
#include "torch/schemas.h"

namespace ssm_kernels::mamba_mixer {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The selective scan between the projections of a Mamba mixer, of (batch, seqlen, ...) sequences: A = -e^A_log, and a
  // softplus on delta. Forward alone also returns what it saves for backward: the last is of _mixer_parameters. Errors about
  // double backward name `layer`.
  const std::string scan_arguments =
      "Tensor x, Tensor delta, Tensor A_log, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, ";
  schemas.def("_mamba_mixer(" + scan_arguments +
              "Tensor? initial_state, str discretization, Tensor? seq_idx=None, Tensor? cu_seqlens=None, str layer='Mamba') "
              "-> (Tensor out, Tensor last_state)");
  schemas.below_autograd("_mamba_mixer_fwd(" + scan_arguments +
                         "Tensor? initial_state, str discretization, bool save_chunk_states, Tensor? seq_idx=None, "
                         "Tensor? cu_seqlens=None) -> (Tensor out, Tensor last_state, Tensor chunk_states, Tensor parameters)");
  schemas.below_autograd(
      "_mamba_mixer_bwd(Tensor? grad_out, Tensor? grad_last_state, " + scan_arguments +
      "Tensor chunk_states, Tensor parameters, str discretization, bool[9] needs_grad, Tensor? initial_state=None, "
      "Tensor? seq_idx=None, Tensor? cu_seqlens=None, str layer='Mamba') -> (Tensor grad_x, Tensor grad_delta, "
      "Tensor grad_A_log, Tensor grad_B, Tensor grad_C, Tensor grad_D, Tensor grad_z, Tensor grad_delta_bias, "
      "Tensor grad_initial_state)");
}

namespace {

using OptionalTensor = std::optional<at::Tensor>;
// Gradients have the scan's order: x, delta, A_log, B, C, D, z, delta_bias, initial_state.
using mixers::transposed;
using selective_scan::GradTensors;
using selective_scan::kGradA;
using selective_scan::kGradB;
using selective_scan::kGradC;
using selective_scan::kGradD;
using selective_scan::kGradDelta;
using selective_scan::kGradDeltaBias;
using selective_scan::kGradInitialState;
using selective_scan::kGradU;
using selective_scan::kGradZ;
using selective_scan::kNumGrads;
using selective_scan::NeedsGrad;

struct Inputs {
  at::Tensor x, delta, A_log, B, C;
  OptionalTensor D, z, delta_bias, initial_state, seq_idx, cu_seqlens;
  std::string_view discretization, layer = "Mamba";

  // The public operator has no such arguments. packed_initial_state is the initial state in backward, if there are packed
  // sequences.
  OptionalTensor packed_initial_state;
  bool save_chunk_states = false, has_initial_state = false, has_gate_of_convolution = false;

  auto fields_but_state() { return std::tie(x, delta, A_log, B, C, D, z, delta_bias); }
  auto fields_of_packed() { return std::tie(seq_idx, cu_seqlens); }
  auto fields() {
    return std::tuple_cat(fields_but_state(), std::tie(initial_state, discretization), fields_of_packed(), std::tie(layer));
  }
};

struct FwdInputs : Inputs {
  auto fields() {
    return std::tuple_cat(fields_but_state(), std::tie(initial_state, discretization, save_chunk_states), fields_of_packed());
  }
};

struct FwdOutputs {
  at::Tensor out, last_state, chunk_states, parameters;

  auto fields() { return std::tie(out, last_state, chunk_states, parameters); }
};

struct BwdInputs {
  OptionalTensor grad_out, grad_last_state;
  Inputs in;
  at::Tensor chunk_states, parameters;
  NeedsGrad needs_grad{};
  // The caller's memory for the gradients of z and delta; not in the schema.
  OptionalTensor grad_z, grad_delta;
  bool reuses_chunk_states = false;  // as of selective_scan::BwdInputs

  auto grads() { return std::tie(grad_out, grad_last_state); }
  auto saved() { return std::tie(chunk_states, parameters); }
  auto fields() {
    return std::tuple_cat(grads(), in.fields_but_state(), saved(),
                          std::tie(in.discretization, needs_grad, in.packed_initial_state), in.fields_of_packed(),
                          std::tie(in.layer));
  }
};

selective_scan::Inputs scan_inputs(const Inputs& in, const mixers::Parameters& wide) {
  return mixers::scan_inputs({in.x, in.delta, in.B, in.C, in.z}, wide, in);
}

template <typename Named>
FwdOutputs fwd(const Named& in) {
  static const Operator<selective_scan::FwdOutputs, selective_scan::FwdInputs> op("ssm_kernels::_selective_scan_fwd");
  const mixers::Parameters wide = mixers::compute_parameters(in.A_log, in.delta_bias, in.D, in.x.scalar_type());
  selective_scan::Inputs scan = scan_inputs(in, wide);
  scan.initial_state = in.initial_state;
  scan.save_chunk_states = in.save_chunk_states;
  auto [out, last_state, chunk_states] = op(scan);
  return {transposed(out), last_state, chunk_states, wide.saved};
}

GradTensors bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const NeedsGrad& needs_grad = bwd.needs_grad;
  const mixers::Parameters wide = mixers::restore_parameters(bwd.parameters, in.A_log, in.delta_bias, in.D);
  selective_scan::BwdOutInputs scan;
  scan.grad_out = transposed(bwd.grad_out);
  scan.grad_last_state = bwd.grad_last_state;
  scan.in = scan_inputs(in, wide);
  scan.in.packed_initial_state = in.packed_initial_state;
  scan.chunk_states = bwd.chunk_states;
  scan.needs_grad = needs_grad;
  scan.reuses_chunk_states = bwd.reuses_chunk_states;
  GradTensors grads;
  if (is_present(bwd.grad_z)) {
    static const Operator<selective_scan::BwdOutGrads, selective_scan::BwdOutInputs> op("ssm_kernels::_selective_scan_bwd_out");
    scan.required_grad_z = transposed(*bwd.grad_z);
    scan.grad_delta = transposed(bwd.grad_delta);
    selective_scan::BwdOutGrads others = op(scan);
    std::move(others.begin(), others.begin() + kGradZ, grads.begin());
    std::move(others.begin() + kGradZ, others.end(), grads.begin() + kGradZ + 1);
    grads[kGradZ] = scan.required_grad_z;
    if (is_present(scan.grad_delta)) grads[kGradDelta] = *scan.grad_delta;
  } else {
    using ScanBackward = Operator<GradTensors, selective_scan::BwdInputs>;
    static const ScanBackward op("ssm_kernels::_selective_scan_bwd"), last("ssm_kernels::_selective_scan_bwd_last");
    grads = bwd.reuses_chunk_states ? last(scan) : op(scan);
  }
  for (const auto place : {kGradU, kGradDelta, kGradB, kGradC, kGradZ}) {
    if (grads[place].dim() == 3) grads[place] = transposed(grads[place]);
  }
  if (needs_grad[kGradA]) grads[kGradA] = mixers::grad_of_A_log(grads[kGradA], wide.A, in.A_log.scalar_type());
  if (needs_grad[kGradD]) grads[kGradD] = mixers::in_dtype_of(grads[kGradD], *in.D);
  if (needs_grad[kGradDeltaBias]) grads[kGradDeltaBias] = mixers::in_dtype_of(grads[kGradDeltaBias], *in.delta_bias);
  return grads;
}

struct MambaMixer : DifferentiableOp<MambaMixer, BwdInputs, std::tuple<at::Tensor, at::Tensor>> {
  static constexpr char kSchema[] = "ssm_kernels::_mamba_mixer", kBackward[] = "ssm_kernels::_mamba_mixer_bwd";

  static const char* name(const Inputs&) { return "Mamba"; }

  static auto differentiable(Inputs& in) { return std::tuple_cat(in.fields_but_state(), std::tie(in.initial_state)); }

  // Calls fwd() directly, or through the dispatcher while a mode records operators or a tensor is not plain.
  static Result forward(Inputs& in, variable_list* saved) {
    static const Operator<FwdOutputs, FwdInputs> op("ssm_kernels::_mamba_mixer_fwd");
    in.save_chunk_states = saved != nullptr;
    const bool is_eager =
        !c10::impl::dispatch_mode_enabled() && has_plain_tensors(std::tuple_cat(differentiable(in), in.fields_of_packed()));
    FwdOutputs outputs = is_eager ? fwd(in) : op(in);
    if (saved != nullptr) {
      in.has_initial_state = is_present(in.initial_state);
      if (is_present(in.seq_idx) || is_present(in.cu_seqlens)) in.packed_initial_state = in.initial_state;
      in.has_gate_of_convolution = is_present(in.z) && mamba_conv::is_gate(*in.z);
      *saved = {std::move(outputs.chunk_states), std::move(outputs.parameters)};
    }
    return {std::move(outputs.out), std::move(outputs.last_state)};
  }

  static auto saved_fields(Inputs& in) {
    return std::tuple_cat(
        in.fields_but_state(), in.fields_of_packed(),
        std::tie(in.packed_initial_state, in.discretization, in.layer, in.has_initial_state, in.has_gate_of_convolution));
  }

  static NeedsGrad has_edges(Inputs& in) {
    NeedsGrad edges = DifferentiableOp::has_edges(in);
    edges[kGradInitialState] = in.has_initial_state;
    return edges;
  }

  static GradTensors backward(BwdInputs& bwd) {
    if (!runs_eagerly() || !has_plain_tensors(std::tuple_cat(bwd.in.fields_but_state(), std::tie(bwd.in.packed_initial_state),
                                                             bwd.in.fields_of_packed(), bwd.saved(), bwd.grads()))) {
      return DifferentiableOp::backward(bwd);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    if (bwd.needs_grad[kGradZ] && bwd.in.has_gate_of_convolution) {
      bwd.grad_z = mamba_conv::allocate_grad_gate(*bwd.in.z);
      // The convolution's backward reuses the left half once nobody refers to the gradient of delta.
      if (bwd.needs_grad[kGradDelta]) bwd.grad_delta = mamba_conv::left_of_grad_gate(*bwd.grad_z);
    }
    bwd.reuses_chunk_states = frees_saved_tensors();
    return mamba_mixer::bwd(bwd);
  }

  // Sequences in the autocast dtype; parameters and states in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.delta, in.B, in.C, in.z);
    to.to_float(in.A_log, in.D, in.delta_bias, in.initial_state);
  }
};

}  // namespace

SSM_DIFFERENTIABLE_OPERATOR(MambaMixer)

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&fwd<FwdInputs>>(m, "_mamba_mixer_fwd");
  implement<&bwd>(m, "_mamba_mixer_bwd");
}

}  // namespace ssm_kernels::mamba_mixer
