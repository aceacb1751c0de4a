// A Mamba mixer from the in-projection's output to the layer's, the other projections included, as one autograd node:
//
//   x, z     = halves of the columns of xz           (batch, seqlen, 2 channels)
//   x        = silu(conv(x))
//   dt, B, C = columns of x x_proj^T                 (batch, seqlen, dt_rank + 2 dstate)
//   y        = selective_scan(x, dt dt_proj^T, -e^A_log, B, C, D, z), with softplus and delta_bias
//   out      = y out_proj^T + out_bias
//
// The node saves xz, the columns of dt, B and C, and the scan's chunk states; with recompute="all" no chunk states. Backward
// computes the rest again: x by the convolution and delta by a product with few terms. The scan's backward writes y, which the
// gradient of out_proj needs, into the memory of its own gradient. So a layer keeps neither x nor delta nor y, and out_proj,
// which is part of the node, keeps no input.
//
// The gradient of xz is one buffer. Its right half receives the gradient of z; its left half first the gradient of delta, then
// that of x. On CUDA backward of the convolution computes the part of its gradient that comes through x_proj (conv_product.h).
//
// The node takes plain tensors in eager calls only. A call that is traced or batched, and one with recompute="none", is
// composed of _mamba_conv, _mamba_mixer and PyTorch's linear.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "causal_conv1d/causal_conv1d_op.h"
#include "mixers/conv_product.h"
#include "mixers/mamba_scan.h"
#include "mixers/mixer_parameters_op.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/eager.h"
#include "torch/schemas.h"

namespace ssm_kernels::mamba_inner {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The Mamba mixer from the in-projection's output to the layer's, with the other projections: see the head of this file. Of
  // what backward needs, recompute="cheap" keeps xz, the output of x_proj and the chunk states, "all" no chunk states.
  schemas.def(
      "_mamba_inner(Tensor xz, Tensor conv_weight, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj, Tensor? delta_bias, "
      "Tensor A_log, Tensor? D, Tensor out_proj, Tensor? out_bias, Tensor? conv_state, Tensor? ssm_state, Tensor? seq_idx, "
      "Tensor? cu_seqlens, str discretization, str recompute='cheap', str layer='Mamba') -> (Tensor out, Tensor last_state)");
}

namespace {

using mixers::transposed;
using OptionalTensor = std::optional<at::Tensor>;
constexpr char kActivation[] = "silu", kNone[] = "none", kAll[] = "all";

// In the order of the operator's arguments.
enum Grad {
  kXz,
  kConvWeight,
  kConvBias,
  kXProj,
  kDtProj,
  kDeltaBias,
  kALog,
  kD,
  kOutProj,
  kOutBias,
  kConvState,
  kSsmState,
  kNumGrads
};
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct Inputs {
  at::Tensor xz, conv_weight;
  OptionalTensor conv_bias;
  at::Tensor x_proj, dt_proj;
  OptionalTensor delta_bias;
  at::Tensor A_log;
  OptionalTensor D;
  at::Tensor out_proj;
  OptionalTensor out_bias, conv_state, ssm_state, seq_idx, cu_seqlens;
  std::string_view discretization, recompute, layer = "Mamba";

  // Not among the operator's arguments. The node saves a state only for packed sequences: it is the first chunk state of
  // others.
  OptionalTensor packed_ssm_state;
  bool has_out_bias = false, has_ssm_state = false;

  auto differentiable() {
    return std::tie(xz, conv_weight, conv_bias, x_proj, dt_proj, delta_bias, A_log, D, out_proj, out_bias, conv_state,
                    ssm_state);
  }
  auto tensors() { return std::tuple_cat(differentiable(), std::tie(seq_idx, cu_seqlens)); }
  auto fields() { return std::tuple_cat(tensors(), std::tie(discretization, recompute, layer)); }

  bool is_packed() const { return is_present(seq_idx) || is_present(cu_seqlens); }
  // Whether backward computes the chunk states again.
  bool recomputes_states() const { return recompute == kAll && (is_packed() || !has_ssm_state); }
};

struct BwdInputs {
  OptionalTensor grad_out, grad_last_state;
  Inputs in;
  // x_dbl: dt, B and C side by side. Without elements, chunk_states are to be computed again.
  at::Tensor x_dbl, chunk_states, parameters;
  NeedsGrad needs_grad{};

  auto grads() { return std::tie(grad_out, grad_last_state); }
  auto saved() { return std::tie(x_dbl, chunk_states, parameters); }
};

at::Tensor left_half(const at::Tensor& xz) { return xz.narrow_symint(-1, 0, xz.sym_size(-1) / 2); }
at::Tensor right_half(const at::Tensor& xz) {
  const c10::SymInt columns = xz.sym_size(-1) / 2;
  return xz.narrow_symint(-1, columns, columns);
}

// A sequence as a matrix with a row for each step.
at::Tensor rows_of(const at::Tensor& sequence) {
  return sequence.reshape({sequence.size(0) * sequence.size(1), sequence.size(2)});
}
at::Tensor sequence_of(const at::Tensor& rows, const at::Tensor& like) {
  return rows.view({like.size(0), like.size(1), rows.size(1)});
}

// dt, B and C.
std::array<at::Tensor, 3> parts_of(const at::Tensor& x_dbl, const Inputs& in) {
  const c10::SymInt rank = in.dt_proj.sym_size(1), dstate = in.A_log.sym_size(1);
  return {x_dbl.narrow_symint(-1, 0, rank), x_dbl.narrow_symint(-1, rank, dstate),
          x_dbl.narrow_symint(-1, rank + dstate, dstate)};
}

causal_conv1d::Inputs convolution_inputs(const Inputs& in) {
  causal_conv1d::Inputs convolution;
  convolution.x = left_half(in.xz);
  convolution.weight = mixers::taps_of(in.conv_weight);
  convolution.bias = in.conv_bias;
  convolution.seq_idx = in.seq_idx;
  convolution.cu_seqlens = in.cu_seqlens;
  convolution.initial_state = in.conv_state;
  convolution.activation = kActivation;
  return convolution;
}

at::Tensor convolve(const Inputs& in) {
  static const Operator<causal_conv1d::FwdOutputs, causal_conv1d::Inputs> op("ssm_kernels::_causal_conv1d_fwd");
  return op(convolution_inputs(in)).out;
}

selective_scan::Inputs scan_inputs(const Inputs& in, const at::Tensor& x, const at::Tensor& delta, const at::Tensor& x_dbl,
                                   const mixers::Parameters& wide) {
  const auto [dt, B, C] = parts_of(x_dbl, in);
  return mixers::scan_inputs({x, delta, B, C, right_half(in.xz)}, wide, in);
}

selective_scan::FwdOutputs scan_forward(const selective_scan::Inputs& scan) {
  static const Operator<selective_scan::FwdOutputs, selective_scan::FwdInputs> op("ssm_kernels::_selective_scan_fwd");
  selective_scan::FwdInputs fwd;
  static_cast<selective_scan::Inputs&>(fwd) = scan;
  return op(fwd);
}

// Each step frees the tensors that later ones do not need: a training step's memory is largest in the backward of the last
// layer.
GradTensors bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const NeedsGrad& needs = bwd.needs_grad;
  const bool has_grad_out = is_present(bwd.grad_out);
  const bool needs_x = needs[kXz] || needs[kConvWeight] || needs[kConvBias] || needs[kConvState];
  const bool needs_x_dbl = needs_x || needs[kXProj], needs_delta = needs_x_dbl || needs[kDtProj];
  const bool needs_scan = needs_delta || needs[kALog] || needs[kD] || needs[kDeltaBias] || needs[kSsmState];
  const bool needs_y = needs[kOutProj] && has_grad_out;

  GradTensors grads;
  at::Tensor grad_out;
  if (has_grad_out) grad_out = rows_of(*bwd.grad_out);
  if (needs[kOutBias] && has_grad_out) grads[kOutBias] = grad_out.sum(0);
  if (!needs_scan && !needs_y) return grads;

  const mixers::Parameters wide = mixers::restore_parameters(bwd.parameters, in.A_log, in.delta_bias, in.D);
  at::Tensor x = convolve(in);
  at::Tensor delta = at::linear(parts_of(bwd.x_dbl, in)[0], in.dt_proj);
  selective_scan::BwdOutInputs scan;
  scan.in = scan_inputs(in, x, delta, bwd.x_dbl, wide);
  if (!needs_scan) {
    scan.in.initial_state = in.packed_ssm_state;
    if (in.has_ssm_state && !in.is_packed()) scan.in.initial_state = bwd.chunk_states.select(1, 0);
    const at::Tensor y = transposed(scan_forward(scan.in).out);
    grads[kOutProj] = at::mm(grad_out.t(), rows_of(y));
    return grads;
  }

  at::Tensor states = bwd.chunk_states;
  scan.reuses_chunk_states = frees_saved_tensors();
  if (states.numel() == 0 && in.recomputes_states()) {
    selective_scan::Inputs again = scan.in;
    again.initial_state = in.packed_ssm_state;
    again.save_chunk_states = true;
    states = scan_forward(again).chunk_states;
    scan.reuses_chunk_states = true;
  }
  at::Tensor grad_y;  // then y
  if (has_grad_out) grad_y = sequence_of(at::mm(grad_out, in.out_proj), in.xz);
  // The scan always writes a gradient of z.
  at::Tensor grad_xz;
  if (needs[kXz]) grad_xz = empty_tensor(in.xz.sym_sizes(), in.xz.options());
  scan.required_grad_z = transposed(needs[kXz] ? right_half(grad_xz) : empty_tensor(x.sym_sizes(), x.options()));
  if (needs[kXz]) scan.grad_delta = transposed(left_half(grad_xz));
  if (has_grad_out) scan.grad_out = transposed(grad_y);
  if (needs_y) scan.out = scan.grad_out;
  scan.grad_last_state = bwd.grad_last_state;
  scan.in.packed_initial_state = in.packed_ssm_state;
  scan.chunk_states = std::move(states);
  scan.needs_grad = {needs_x,   needs_delta, needs[kALog],      needs_x_dbl,     needs_x_dbl,
                     needs[kD], needs[kXz],  needs[kDeltaBias], needs[kSsmState]};
  static const Operator<selective_scan::BwdOutGrads, selective_scan::BwdOutInputs> op("ssm_kernels::_selective_scan_bwd_out");
  auto [grad_u, own_grad_delta, grad_A, grad_B, grad_C, grad_D, grad_bias, grad_state] = op(scan);
  at::Tensor grad_delta = is_present(scan.grad_delta) ? *scan.grad_delta : std::move(own_grad_delta);
  scan = {};
  delta.reset();
  if (needs[kALog]) grads[kALog] = mixers::grad_of_A_log(grad_A, wide.A, in.A_log.scalar_type());
  if (needs[kD]) grads[kD] = mixers::in_dtype_of(grad_D, *in.D);
  if (needs[kDeltaBias]) grads[kDeltaBias] = mixers::in_dtype_of(grad_bias, *in.delta_bias);
  if (needs[kSsmState]) grads[kSsmState] = std::move(grad_state);
  if (needs_y) grads[kOutProj] = at::mm(grad_out.t(), rows_of(grad_y));
  grad_y.reset();
  if (!needs_delta) return grads;

  grad_delta = rows_of(transposed(grad_delta));
  if (needs[kDtProj]) grads[kDtProj] = at::mm(grad_delta.t(), rows_of(parts_of(bwd.x_dbl, in)[0]));
  if (!needs_x_dbl) return grads;
  const at::Tensor grad_x_dbl =
      at::cat({at::mm(grad_delta, in.dt_proj), rows_of(transposed(grad_B)), rows_of(transposed(grad_C))}, -1);
  grad_delta.reset();
  if (needs[kXProj]) grads[kXProj] = at::mm(grad_x_dbl.t(), rows_of(x));
  x.reset();
  if (!needs_x) return grads;

  const at::Tensor grad_x = transposed(grad_u);
  causal_conv1d::BwdOutInputs convolution;
  convolution.grad_out = grad_x;
  convolution.in = convolution_inputs(in);
  convolution.needs_grad = {needs[kXz], needs[kConvWeight], needs[kConvBias], needs[kConvState]};
  if (needs[kXz]) convolution.required_grad_x = left_half(grad_xz);
  std::optional<causal_conv1d::BwdOutGrads> fused;
  if (needs[kXz]) fused = mixers::conv_bwd_of_product(convolution, grad_x_dbl, in.x_proj);
  causal_conv1d::BwdOutGrads of_parameters;
  if (fused) {
    of_parameters = std::move(*fused);
  } else {
    at::Tensor sum = rows_of(grad_x);
    at::addmm_out(sum, sum, grad_x_dbl, in.x_proj);
    convolution.grad_out = sequence_of(sum, in.xz);
    if (needs[kXz]) {
      static const Operator<causal_conv1d::BwdOutGrads, causal_conv1d::BwdOutInputs> conv(
          "ssm_kernels::_causal_conv1d_bwd_out");
      of_parameters = conv(convolution);
    } else {
      static const Operator<causal_conv1d::GradTensors, causal_conv1d::BwdInputs> conv("ssm_kernels::_causal_conv1d_bwd");
      causal_conv1d::GradTensors computed = conv(convolution);
      std::move(computed.begin() + 1, computed.end(), of_parameters.begin());
    }
  }
  if (needs[kXz]) grads[kXz] = std::move(grad_xz);
  if (needs[kConvWeight]) grads[kConvWeight] = of_parameters[0].view(in.conv_weight.sizes());
  if (needs[kConvBias]) grads[kConvBias] = std::move(of_parameters[1]);
  if (needs[kConvState]) grads[kConvState] = std::move(of_parameters[2]);
  return grads;
}

using Result = std::tuple<at::Tensor, at::Tensor>;

struct ConvArguments {
  at::Tensor xz, weight;
  OptionalTensor bias, initial_state;
  std::string_view layer;

  auto fields() { return std::tie(xz, weight, bias, initial_state, layer); }
};

struct MixerArguments {
  at::Tensor x, delta, A_log, B, C;
  OptionalTensor D, z, delta_bias, initial_state;
  std::string_view discretization;
  OptionalTensor seq_idx, cu_seqlens;
  std::string_view layer;

  auto fields() {
    return std::tie(x, delta, A_log, B, C, D, z, delta_bias, initial_state, discretization, seq_idx, cu_seqlens, layer);
  }
};

// Composes the operators that a layer calls whose projections are modules.
Result compose(const Inputs& in) {
  static const Operator<std::tuple<at::Tensor, at::Tensor, at::Tensor>, ConvArguments> convolution("ssm_kernels::_mamba_conv");
  static const Operator<causal_conv1d::FwdOutputs, causal_conv1d::Inputs> packed_convolution("ssm_kernels::_causal_conv1d");
  static const Operator<Result, MixerArguments> mixer("ssm_kernels::_mamba_mixer");
  at::Tensor x, scanned, z;
  if (in.is_packed()) {
    x = scanned = packed_convolution(convolution_inputs(in)).out;
    z = right_half(in.xz);
  } else {
    std::tie(x, scanned, z) = convolution(ConvArguments{in.xz, in.conv_weight, in.conv_bias, in.conv_state, in.layer});
  }
  const auto [dt, B, C] = parts_of(at::linear(x, in.x_proj), in);
  auto [y, last_state] = mixer(MixerArguments{scanned, at::linear(dt, in.dt_proj), in.A_log, B, C, in.D, z, in.delta_bias,
                                              in.ssm_state, in.discretization, in.seq_idx, in.cu_seqlens, in.layer});
  return {at::linear(y, in.out_proj, in.out_bias), last_state};
}

// Backward of a call whose derivatives are recorded or whose gradients are batched: that of the composed operators, which raise
// errors for what they do not support.
GradTensors compose_backward(BwdInputs& bwd) {
  // The engine has excluded autograd, which the composed forward needs.
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(keys.included_,
                                                       keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const bool records = at::GradMode::is_enabled();
  Inputs& in = bwd.in;
  GradTensors grads;
  if (bwd.needs_grad[kOutBias] && is_present(bwd.grad_out)) grads[kOutBias] = bwd.grad_out->sum(at::IntArrayRef({0, 1}));
  bwd.needs_grad[kOutBias] = false;
  in.ssm_state = in.packed_ssm_state;
  if (in.has_ssm_state && !in.is_packed()) {
    in.ssm_state = bwd.chunk_states.select(1, 0).detach().set_requires_grad(bwd.needs_grad[kSsmState]);
  }
  variable_list outputs, grad_outputs, inputs;
  {
    const at::AutoGradMode enabled(true);
    const Result result = compose(in);
    const auto add = [&](const at::Tensor& output, const OptionalTensor& grad) {
      if (!is_present(grad)) return;
      outputs.push_back(output);
      grad_outputs.push_back(*grad);
    };
    add(std::get<0>(result), bwd.grad_out);
    add(std::get<1>(result), bwd.grad_last_state);
  }
  const auto for_each_needed = [&](const auto& visit) {
    size_t place = 0;
    const auto next = [&](const auto& tensor) {
      if (bwd.needs_grad[place]) visit(place, or_undefined(tensor));
      ++place;
    };
    std::apply([&](const auto&... tensor) { (next(tensor), ...); }, in.differentiable());
  };
  for_each_needed([&](size_t, const at::Tensor& tensor) { inputs.push_back(tensor); });
  if (inputs.empty()) return grads;
  variable_list computed = torch::autograd::grad(outputs, inputs, grad_outputs, /*retain_graph=*/records,
                                                 /*create_graph=*/records, /*allow_unused=*/true);
  auto grad = computed.begin();
  for_each_needed([&](size_t place, const at::Tensor&) { grads[place] = std::move(*grad++); });
  return grads;
}

struct MambaInner : DifferentiableOp<MambaInner, BwdInputs, Result> {
  static constexpr char kSchema[] = "ssm_kernels::_mamba_inner";
  // Backward takes real tensors.
  static constexpr bool kIsTraceable = false;

  static auto differentiable(Inputs& in) { return in.differentiable(); }

  static Result forward(Inputs& in, variable_list* saved) {
    in.has_out_bias = is_present(in.out_bias);
    in.has_ssm_state = is_present(in.ssm_state);
    if (in.is_packed()) in.packed_ssm_state = in.ssm_state;
    const at::Tensor x = convolve(in), x_dbl = at::linear(x, in.x_proj);
    const mixers::Parameters wide = mixers::compute_parameters(in.A_log, in.delta_bias, in.D, in.xz.scalar_type());
    selective_scan::Inputs scan = scan_inputs(in, x, at::linear(parts_of(x_dbl, in)[0], in.dt_proj), x_dbl, wide);
    scan.initial_state = in.ssm_state;
    scan.save_chunk_states = !in.recomputes_states();
    auto [y, last_state, chunk_states] = scan_forward(scan);
    *saved = {x_dbl, std::move(chunk_states), wide.saved};
    return {at::linear(transposed(y), in.out_proj, in.out_bias), std::move(last_state)};
  }

  static auto saved_fields(Inputs& in) {
    return std::tie(in.xz, in.conv_weight, in.conv_bias, in.x_proj, in.dt_proj, in.delta_bias, in.A_log, in.D, in.out_proj,
                    in.conv_state, in.packed_ssm_state, in.seq_idx, in.cu_seqlens, in.discretization, in.recompute, in.layer,
                    in.has_out_bias, in.has_ssm_state);
  }

  static NeedsGrad has_edges(Inputs& in) {
    NeedsGrad edges = DifferentiableOp::has_edges(in);
    edges[kOutBias] = in.has_out_bias;
    edges[kSsmState] = in.has_ssm_state;
    return edges;
  }

  static GradTensors backward(BwdInputs& in) {
    if (records_derivatives() || !has_plain_tensors(std::tuple_cat(in.in.tensors(), in.saved(), in.grads()))) {
      return compose_backward(in);
    }
    // Products have the dtype of forward's, also where backward runs under autocast.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return mamba_inner::bwd(in);
  }

  // Sequences, states of the convolution and weights in the autocast dtype; the scan's parameters and state in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.xz, in.conv_state, in.x_proj, in.dt_proj, in.out_proj, in.out_bias);
    to.to_float_unless(to.lower, in.conv_weight, in.conv_bias);
    to.to_float(in.A_log, in.D, in.delta_bias, in.ssm_state);
  }
};

bool is_transformed() {
  try {
    check_no_func_transform("Mamba");
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

Result mamba_inner(Inputs& in) {
  const bool makes_node = std::apply(
      [](const auto&... tensor) {
        return (needs_autograd(tensor) || ...) && !(has_tangent(tensor) || ...) &&
               (is_plain_tensor(or_undefined(tensor)) && ...);
      },
      in.tensors());
  if (!makes_node || in.recompute == kNone || c10::impl::dispatch_mode_enabled() || is_transformed()) return compose(in);
  return std::apply(
      [&](const auto&... tensors) -> Result {
        variable_list results = AutogradNode<MambaInner>::apply(in, tensors...);
        return {std::move(results[0]), std::move(results[1])};
      },
      in.differentiable());
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { implement<&mamba_inner>(m, "_mamba_inner"); }

SSM_AUTOCAST_OPERATOR(MambaInner)

}  // namespace ssm_kernels::mamba_inner
