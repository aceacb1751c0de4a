// Between the operator's dispatcher-facing half (selective_scan_op.cpp) and its devices: checked arguments, the tensors that
// forward and backward return, and all of them as plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "selective_scan/selective_scan.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_scan {

using OptionalTensor = std::optional<at::Tensor>;

// The inputs of forward, by reference: valid for the duration of the call.
struct Inputs {
  const at::Tensor &u, &delta, &A, &B, &C;
  const OptionalTensor &D, &z, &delta_bias, &initial_state;
};

// Raises unless the inputs are as ssm_kernels.selective_scan documents; returns the method.
Discretization check_inputs(const Inputs& in, std::string_view discretization);

struct FwdOutputs {
  at::Tensor out, last_state, chunk_states;
};
// Uninitialized, on the device of u (the Meta device included). This is the one place that knows what forward saves.
FwdOutputs allocate_fwd(const Inputs& in, bool save_chunk_states);

// In the order of backward's results.
enum Grad { kGradU, kGradDelta, kGradA, kGradB, kGradC, kGradD, kGradZ, kGradDeltaBias, kGradInitialState, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;
// Checks what backward is given beside the inputs, then as allocate_fwd. Gradients of sequences have the layout of the
// sequence, those of parameters and states are contiguous, and those absent or not needed have no elements. The initial state
// is the first of chunk_states, not among the inputs: needs_grad alone says whether its gradient is asked for. With grad_z, the
// gradient of z is that tensor, and likewise that of delta.
GradTensors allocate_bwd(const Inputs& in, const OptionalTensor& grad_out, const OptionalTensor& grad_last_state,
                         const at::Tensor& chunk_states, const NeedsGrad& needs_grad, const OptionalTensor& grad_z,
                         const OptionalTensor& grad_delta);

using GradTuple =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
inline GradTuple as_tuple(const GradTensors& grads) { return std::tuple_cat(grads); }

// The signatures of _selective_scan_fwd, _selective_scan_bwd, and _selective_scan_bwd_out, which writes the gradient of z, and
// of delta if it is told to, where it is told to and returns the others.
using FwdSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
    const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias, const OptionalTensor& initial_state,
    std::string_view discretization, bool delta_softplus, bool save_chunk_states);
using BwdSignature = GradTuple(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& u,
                               const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                               const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                               const at::Tensor& chunk_states, std::string_view discretization, bool delta_softplus,
                               NeedsGrad needs_grad);
using BwdOutResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BwdOutSignature = BwdOutResult(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& u,
                                     const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                                     const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                                     const at::Tensor& chunk_states, std::string_view discretization, bool delta_softplus,
                                     NeedsGrad needs_grad, at::Tensor& grad_z, const OptionalTensor& grad_delta);

// The arguments of a device's backward, which returns gradients as allocate_bwd makes them.
struct BwdCall {
  const OptionalTensor &grad_out, &grad_last_state;
  Inputs in;  // without an initial state, which is the first of chunk_states
  const at::Tensor& chunk_states;
  std::string_view discretization;
  bool delta_softplus;
  NeedsGrad needs_grad;
  const OptionalTensor &grad_z, &grad_delta;
};

// The dispatcher's kernels of backward, both forms, of a device's function.
template <GradTensors (*compute)(const BwdCall&)>
struct BwdKernels {
  static GradTuple bwd(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& u,
                       const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                       const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                       const at::Tensor& chunk_states, std::string_view discretization, bool delta_softplus,
                       NeedsGrad needs_grad) {
    const OptionalTensor absent;
    return as_tuple(compute({grad_out,
                             grad_last_state,
                             {u, delta, A, B, C, D, z, delta_bias, absent},
                             chunk_states,
                             discretization,
                             delta_softplus,
                             needs_grad,
                             absent,
                             absent}));
  }

  static BwdOutResult bwd_out(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& u,
                              const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                              const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                              const at::Tensor& chunk_states, std::string_view discretization, bool delta_softplus,
                              NeedsGrad needs_grad, at::Tensor& grad_z, const OptionalTensor& grad_delta) {
    const OptionalTensor absent, target = grad_z;
    GradTensors grads = compute({grad_out,
                                 grad_last_state,
                                 {u, delta, A, B, C, D, z, delta_bias, absent},
                                 chunk_states,
                                 discretization,
                                 delta_softplus,
                                 needs_grad,
                                 target,
                                 grad_delta});
    // Results share no memory with arguments.
    if (is_present(grad_delta)) grads[kGradDelta] = at::empty({0}, A.options());
    return {std::move(grads[kGradU]),         std::move(grads[kGradDelta]),       std::move(grads[kGradA]),
            std::move(grads[kGradB]),         std::move(grads[kGradC]),           std::move(grads[kGradD]),
            std::move(grads[kGradDeltaBias]), std::move(grads[kGradInitialState])};
  }
};

SelectiveScanFwdParams make_fwd_params(const Inputs& in, Discretization method, bool delta_softplus, const FwdOutputs& outputs);
// chunk_states must be contiguous. Gradients without elements are absent: their views are empty, their pointers null.
SelectiveScanBwdParams make_bwd_params(const Inputs& in, Discretization method, bool delta_softplus,
                                       const OptionalTensor& grad_out, const OptionalTensor& grad_last_state,
                                       const at::Tensor& chunk_states, const GradTensors& grads);

}  // namespace ssm_kernels::selective_scan
