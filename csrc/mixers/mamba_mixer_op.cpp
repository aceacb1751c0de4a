// What stands between the projections to the step sizes and out of a Mamba mixer, as one differentiable operator for every
// device: the selective scan of sequences (batch, seqlen, ...), as projections give them, with A = -e^A_log and a softplus on
// delta.
//
// It saves what the scan saves, and the parameters as the scan reads them. The transposes and A are part of it, so that a call
// of the layer is one node of the graph here.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>

#include "mixers/mamba_conv_op.h"
#include "mixers/mixer_parameters_op.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/eager.h"
#include "torch/needs_autograd.h"

namespace ssm_kernels::mamba_mixer {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
// The places of x, delta, A_log, B, C, D, z, delta_bias and initial_state: those of the scan's inputs.
using selective_scan::GradTensors;
using selective_scan::GradTuple;
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

using Result = std::tuple<at::Tensor, at::Tensor>;
using Signature = Result(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                         const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                         const OptionalTensor& delta_bias, const OptionalTensor& initial_state,
                         std::string_view discretization);
using FwdResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FwdSignature = FwdResult(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                               const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                               const OptionalTensor& delta_bias, const OptionalTensor& initial_state,
                               std::string_view discretization, bool save_chunk_states);
using BwdSignature = GradTuple(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& x,
                               const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B, const at::Tensor& C,
                               const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                               const at::Tensor& chunk_states, const at::Tensor& parameters, std::string_view discretization,
                               NeedsGrad needs_grad);

// Between (batch, seqlen, channels) and the scan's (batch, channels, seqlen), either way, without a copy.
at::Tensor transposed(const at::Tensor& sequence) { return sequence.transpose(1, 2); }
OptionalTensor transposed(const OptionalTensor& sequence) {
  return is_present(sequence) ? OptionalTensor(transposed(*sequence)) : std::nullopt;
}

template <typename Tuple>
auto as_array(const Tuple& tuple) {
  return std::apply([](const auto&... grad) { return std::array<at::Tensor, sizeof...(grad)>{grad...}; }, tuple);
}

FwdResult fwd(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B, const at::Tensor& C,
              const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
              const OptionalTensor& initial_state, std::string_view discretization, bool save_chunk_states) {
  static const auto op = find_op<selective_scan::FwdSignature>("ssm_kernels::_selective_scan_fwd");
  const mixers::Parameters wide = mixers::compute_parameters(A_log, delta_bias, D, x.scalar_type());
  auto [out, last_state, chunk_states] =
      op.call(transposed(x), transposed(delta), wide.A, transposed(B), transposed(C), wide.D, transposed(z), wide.bias,
              initial_state, discretization, /*delta_softplus=*/true, save_chunk_states);
  return {transposed(out), last_state, chunk_states, wide.saved};
}

// With grad_z, the gradient of z is written there, and with grad_delta that of delta.
GradTensors compute_grads(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& x,
                          const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B, const at::Tensor& C,
                          const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                          const at::Tensor& chunk_states, const at::Tensor& parameters, std::string_view discretization,
                          NeedsGrad needs_grad, const OptionalTensor& grad_z, const OptionalTensor& grad_delta) {
  const mixers::Parameters wide = mixers::restore_parameters(parameters, A_log, delta_bias, D);
  const auto call = [&](const auto& op, auto&... targets) {
    return as_array(op.call(transposed(grad_out), grad_last_state, transposed(x), transposed(delta), wide.A, transposed(B),
                            transposed(C), wide.D, transposed(z), wide.bias, chunk_states, discretization,
                            /*delta_softplus=*/true, needs_grad, targets...));
  };
  GradTensors grads;
  if (is_present(grad_z)) {
    static const auto op = find_op<selective_scan::BwdOutSignature>("ssm_kernels::_selective_scan_bwd_out");
    at::Tensor target = transposed(*grad_z);
    const OptionalTensor target_of_delta = transposed(grad_delta);
    const auto others = call(op, target, target_of_delta);
    for (size_t i = 0, other = 0; i < kNumGrads; ++i) grads[i] = i == kGradZ ? target : others[other++];
    if (is_present(target_of_delta)) grads[kGradDelta] = *target_of_delta;
  } else {
    static const auto op = find_op<selective_scan::BwdSignature>("ssm_kernels::_selective_scan_bwd");
    grads = call(op);
  }
  for (const auto place : {kGradU, kGradDelta, kGradB, kGradC, kGradZ}) {
    if (grads[place].dim() == 3) grads[place] = transposed(grads[place]);
  }
  if (needs_grad[kGradA]) grads[kGradA] = mixers::grad_of_A_log(grads[kGradA], wide.A, A_log.scalar_type());
  if (needs_grad[kGradD]) grads[kGradD] = mixers::in_dtype_of(grads[kGradD], *D);
  if (needs_grad[kGradDeltaBias]) grads[kGradDeltaBias] = mixers::in_dtype_of(grads[kGradDeltaBias], *delta_bias);
  return grads;
}

GradTuple bwd(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& x,
              const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B, const at::Tensor& C,
              const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
              const at::Tensor& chunk_states, const at::Tensor& parameters, std::string_view discretization,
              NeedsGrad needs_grad) {
  return selective_scan::as_tuple(compute_grads(grad_out, grad_last_state, x, delta, A_log, B, C, D, z, delta_bias,
                                                chunk_states, parameters, discretization, needs_grad, std::nullopt,
                                                std::nullopt));
}

// Forward as an operator or, where nothing records operators, as a function.
FwdResult call_fwd(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                   const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                   const OptionalTensor& initial_state, std::string_view discretization, bool save_chunk_states) {
  const std::array<at::Tensor, kNumGrads> tensors{
      x, delta, A_log, B, C, or_undefined(D), or_undefined(z), or_undefined(delta_bias), or_undefined(initial_state)};
  if (!c10::impl::dispatch_mode_enabled() && are_plain(tensors)) {
    return fwd(x, delta, A_log, B, C, D, z, delta_bias, initial_state, discretization, save_chunk_states);
  }
  static const auto op = find_op<FwdSignature>("ssm_kernels::_mamba_mixer_fwd");
  return op.call(x, delta, A_log, B, C, D, z, delta_bias, initial_state, discretization, save_chunk_states);
}

Result mixer_no_grad(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                     const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                     const OptionalTensor& initial_state, std::string_view discretization) {
  auto [out, last_state, chunk_states, parameters] =
      call_fwd(x, delta, A_log, B, C, D, z, delta_bias, initial_state, discretization, /*save_chunk_states=*/false);
  return {out, last_state};
}

class MambaMixer : public torch::autograd::Function<MambaMixer> {
 public:
  // Backward calls a registered operator and nothing else unless it runs eagerly, so compiled autograd may look inside.
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                                                const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                                const OptionalTensor& delta_bias, const OptionalTensor& initial_state,
                                                const std::string& discretization) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, last_state, chunk_states, parameters] =
        call_fwd(x, delta, A_log, B, C, D, z, delta_bias, initial_state, discretization, /*save_chunk_states=*/true);
    // chunk_states takes the place of initial_state: its first state is the initial state.
    ctx->save_for_backward(
        {x, delta, A_log, B, C, or_undefined(D), or_undefined(z), or_undefined(delta_bias), chunk_states, parameters});
    ctx->saved_data["has_initial_state"] = is_present(initial_state);
    ctx->saved_data["has_gate_of_convolution"] = is_present(z) && mamba_conv::is_gate(*z);
    ctx->saved_data["discretization"] = discretization;
    ctx->set_materialize_grads(false);
    return {out, last_state};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    constexpr size_t kNumArguments = kNumGrads + 1;  // of forward, after ctx
    torch::autograd::variable_list result(kNumArguments);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    // Absent tensors have no edge of the graph.
    NeedsGrad needs_grad{};
    size_t edge = 0;
    for (size_t i = 0; i < kNumGrads; ++i) {
      const bool has_edge = i == kGradInitialState ? ctx->saved_data["has_initial_state"].toBool() : saved[i].defined();
      needs_grad[i] = has_edge && ctx->needs_input_grad(edge++);
    }
    const std::string_view discretization = ctx->saved_data["discretization"].toStringView();
    const auto call = [&](const auto& function, const auto&... targets) {
      return function(or_absent(grads[0]), or_absent(grads[1]), saved[kGradU], saved[kGradDelta], saved[kGradA], saved[kGradB],
                      saved[kGradC], or_absent(saved[kGradD]), or_absent(saved[kGradZ]), or_absent(saved[kGradDeltaBias]),
                      saved[kGradInitialState], saved[kNumGrads], discretization, needs_grad, targets...);
    };
    GradTensors computed;
    if (runs_eagerly() && are_plain(saved) && are_plain(grads)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      const bool is_half = needs_grad[kGradZ] && ctx->saved_data["has_gate_of_convolution"].toBool();
      OptionalTensor grad_z, grad_delta;
      if (is_half) {
        grad_z = mamba_conv::allocate_grad_gate(saved[kGradZ]);
        // The left half is free once nobody refers to the gradient of delta, which the convolution's backward checks.
        if (needs_grad[kGradDelta]) grad_delta = mamba_conv::left_of_grad_gate(*grad_z);
      }
      computed = call(compute_grads, grad_z, grad_delta);
    } else {
      static const auto op = find_op<BwdSignature>("ssm_kernels::_mamba_mixer_bwd");
      computed = as_array(call([](const auto&... arguments) { return op.call(arguments...); }));
    }
    for (size_t i = 0; i < kNumGrads; ++i) {
      if (needs_grad[i]) result[i] = std::move(computed[i]);
    }
    return result;
  }
};

Result mixer_autograd(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                      const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                      const OptionalTensor& initial_state, std::string_view discretization) {
  check_no_func_transform("Mamba");
  if (!any_needs_autograd(x, delta, A_log, B, C, D, z, delta_bias, initial_state)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return mixer_no_grad(x, delta, A_log, B, C, D, z, delta_bias, initial_state, discretization);
  }
  auto outputs = MambaMixer::apply(x, delta, A_log, B, C, D, z, delta_bias, initial_state, std::string(discretization));
  return {outputs[0], outputs[1]};
}

// Sequences in the autocast dtype; parameters and states in float32.
template <at::DeviceType device_type>
Result mixer_autocast(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A_log, const at::Tensor& B,
                      const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                      const OptionalTensor& initial_state, std::string_view discretization) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const at::ScalarType lower = at::autocast::get_autocast_dtype(device_type);
  const auto sequence = [&](const auto& tensor) { return at::autocast::cached_cast(lower, tensor, device_type); };
  const auto parameter = [&](const auto& tensor) { return at::autocast::cached_cast(at::kFloat, tensor, device_type); };
  static const auto op = find_op<Signature>("ssm_kernels::_mamba_mixer");
  return op.call(sequence(x), sequence(delta), parameter(A_log), sequence(B), sequence(C), parameter(D), sequence(z),
                 parameter(delta_bias), parameter(initial_state), discretization);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("_mamba_mixer", &mixer_no_grad);
  m.impl("_mamba_mixer_fwd", &fwd);
  m.impl("_mamba_mixer_bwd", &bwd);
}

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) {
  m.impl("_mamba_mixer", &mixer_autograd);
  m.impl("_mamba_mixer_fwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("_mamba_mixer_bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) { m.impl("_mamba_mixer", &mixer_autocast<at::kCPU>); }

TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) { m.impl("_mamba_mixer", &mixer_autocast<at::kCUDA>); }

}  // namespace ssm_kernels::mamba_mixer
