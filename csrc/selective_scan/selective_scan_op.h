// Between the operator's dispatcher-facing half (selective_scan_op.cpp) and its devices: checked arguments, the tensors that
// forward and backward return, and all of them as plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "selective_scan/selective_scan.h"

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
// is the first of chunk_states, not among the inputs: needs_grad alone says whether its gradient is asked for.
GradTensors allocate_bwd(const Inputs& in, const OptionalTensor& grad_out, const OptionalTensor& grad_last_state,
                         const at::Tensor& chunk_states, const NeedsGrad& needs_grad);

using GradTuple =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
inline GradTuple as_tuple(const GradTensors& grads) { return std::tuple_cat(grads); }

SelectiveScanFwdParams make_fwd_params(const Inputs& in, Discretization method, bool delta_softplus, const FwdOutputs& outputs);
// chunk_states must be contiguous. Gradients without elements are absent: their views are empty, their pointers null.
SelectiveScanBwdParams make_bwd_params(const Inputs& in, Discretization method, bool delta_softplus,
                                       const OptionalTensor& grad_out, const OptionalTensor& grad_last_state,
                                       const at::Tensor& chunk_states, const GradTensors& grads);

}  // namespace ssm_kernels::selective_scan
