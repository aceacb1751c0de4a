// The arguments of the Mamba-2 mixer, the parts of `projected` and of the convolution's output, and the arguments of the
// convolution, the scan and the norm that they make. mamba2_mixer_op.cpp has the formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <tuple>

#include "causal_conv1d/causal_conv1d_op.h"
#include "mixers/mixer_parameters_op.h"
#include "norm/norm_call.h"
#include "ssd/ssd_op.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/eager.h"

namespace ssm_kernels::mamba2_mixer {

using OptionalTensor = std::optional<at::Tensor>;
inline constexpr char kOp[] = "Mamba2", kActivation[] = "silu";

struct Inputs {
  at::Tensor projected, conv_weight;
  OptionalTensor conv_bias;
  at::Tensor A_log;
  OptionalTensor D;
  at::Tensor dt_bias;
  OptionalTensor norm_weight, conv_state, ssm_state, seq_idx, cu_seqlens;
  int64_t headdim = 0, groups = 0, dstate = 0;
  std::optional<c10::SymInt> chunk_size;
  double dt_min = 0, dt_max = 0, eps = 0;
  bool norm_before_gate = false;
  std::string_view discretization, layer = kOp;

  auto differentiable() {
    return std::tie(projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state);
  }
  auto tensors() { return std::tuple_cat(differentiable(), std::tie(seq_idx, cu_seqlens)); }
  auto fields_but_layer() {
    return std::tuple_cat(tensors(),
                          std::tie(headdim, groups, dstate, chunk_size, dt_min, dt_max, eps, norm_before_gate, discretization));
  }
  auto fields() { return std::tuple_cat(fields_but_layer(), std::tie(layer)); }
};

// The sizes and parts of `projected`, and the arguments of the operators that the mixer is composed of.
struct Call {
  const Inputs& in;
  int64_t heads, d_ssm, d_conv_in;
  mixers::Parameters parameters;  // A, the bias of dt and D as the scan reads them

  // saved_parameters: those that forward saved or, in forward, an undefined tensor.
  Call(const Inputs& in, const at::Tensor& saved_parameters)
      : in(in),
        heads(in.dt_bias.size(0)),
        d_ssm(heads * in.headdim),
        d_conv_in(d_ssm + 2 * in.groups * in.dstate),
        parameters(saved_parameters.defined()
                       ? mixers::restore_parameters(saved_parameters, in.A_log, in.dt_bias, in.D)
                       : mixers::compute_parameters(in.A_log, in.dt_bias, in.D, in.projected.scalar_type())) {
    const c10::SymInt columns = in.projected.sym_size(-1);
    TORCH_CHECK_VALUE(columns == d_ssm + d_conv_in + heads, kOp, ": expected projected of ", d_ssm + d_conv_in + heads,
                      " columns, got ", columns);
  }

  bool has_norm() const { return is_present(in.norm_weight); }

  at::Tensor z_of(const at::Tensor& projected) const { return columns(projected, 0, {d_ssm}); }
  at::Tensor conv_in_of(const at::Tensor& projected) const { return columns(projected, d_ssm, {d_conv_in}); }
  at::Tensor dt_of(const at::Tensor& projected) const { return columns(projected, d_ssm + d_conv_in, {heads}); }
  // The first d_ssm columns as (heads, headdim): y, and z of `projected`.
  at::Tensor in_heads(const at::Tensor& sequence) const { return columns(sequence, 0, {heads, in.headdim}); }

  // x, B and C as views of the convolution's output, or their gradients as views of its gradient.
  at::Tensor x_of(const at::Tensor& conv_out) const { return in_heads(conv_out); }
  at::Tensor B_of(const at::Tensor& conv_out) const { return in_groups(conv_out, 0); }
  at::Tensor C_of(const at::Tensor& conv_out) const { return in_groups(conv_out, 1); }

  ssd::Inputs scan_inputs(const at::Tensor& conv_out) const {
    ssd::Inputs scan;
    scan.x = x_of(conv_out);
    scan.dt = dt_of(in.projected);
    scan.A = parameters.A;
    scan.B = B_of(conv_out);
    scan.C = C_of(conv_out);
    scan.chunk_size = in.chunk_size;
    scan.D = parameters.D;
    if (!has_norm()) scan.z = in_heads(in.projected);
    scan.dt_bias = parameters.bias;
    scan.dt_softplus = true;
    scan.dt_min = in.dt_min;
    scan.dt_max = in.dt_max;
    scan.initial_states = in.ssm_state;
    scan.seq_idx = in.seq_idx;
    scan.cu_seqlens = in.cu_seqlens;
    scan.discretization = in.discretization;
    return scan;
  }

  causal_conv1d::Inputs convolution_inputs() const {
    causal_conv1d::Inputs convolution;
    convolution.x = conv_in_of(in.projected);
    convolution.weight = mixers::taps_of(in.conv_weight);
    convolution.bias = in.conv_bias;
    convolution.seq_idx = in.seq_idx;
    convolution.cu_seqlens = in.cu_seqlens;
    convolution.initial_state = in.conv_state;
    convolution.activation = kActivation;
    return convolution;
  }

  causal_conv1d::FwdOutputs convolve() const {
    static const Operator<causal_conv1d::FwdOutputs, causal_conv1d::Inputs> op("ssm_kernels::_causal_conv1d_fwd");
    return op(convolution_inputs());
  }

  norm::GatedInputs norm_inputs(const at::Tensor& y) const {
    norm::GatedInputs norm;
    norm.x = y;
    norm.weight = in.norm_weight;
    norm.z = z_of(in.projected);
    norm.eps = in.eps;
    norm.group_size = c10::SymInt(d_ssm / in.groups);
    norm.norm_before_gate = in.norm_before_gate;
    norm.activation = kActivation;
    return norm;
  }

  norm::GatedOutputs normalize(const at::Tensor& y) const {
    static const Operator<norm::GatedOutputs, norm::GatedFwdInputs> op("ssm_kernels::_norm_gated_fwd");
    return op(norm::GatedFwdInputs{norm_inputs(y), {}});
  }

 private:
  at::Tensor in_groups(const at::Tensor& conv_out, int64_t which) const {
    return columns(conv_out, d_ssm + which * in.groups * in.dstate, {in.groups, in.dstate});
  }

  // A view of consecutive columns, reshaped to `axes`. as_strided makes it in one operator unless operators are recorded.
  static at::Tensor columns(const at::Tensor& tensor, int64_t first, std::initializer_list<int64_t> axes) {
    const int64_t count = c10::multiply_integers(axes);
    if (c10::impl::dispatch_mode_enabled() || !is_plain_tensor(tensor)) {
      const at::Tensor narrow = tensor.narrow(-1, first, count);
      return axes.size() == 1 ? narrow : narrow.unflatten(-1, axes);
    }
    const int64_t stride = tensor.stride(-1);
    c10::DimVector sizes(tensor.sizes().begin(), tensor.sizes().end() - 1);
    c10::DimVector strides(tensor.strides().begin(), tensor.strides().end() - 1);
    int64_t inner = count;
    for (const int64_t size : axes) {
      inner /= std::max<int64_t>(1, size);
      sizes.push_back(size);
      strides.push_back(inner * stride);
    }
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + first * stride);
  }
};

}  // namespace ssm_kernels::mamba2_mixer
