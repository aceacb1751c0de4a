// Shared by the dispatcher's side of the selective scan (selective_scan_op.cpp) and its devices: arguments and results of its
// operators, checks and allocation, and conversion to plain data.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "selective_scan/selective_scan.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_scan {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor u, delta, A, B, C;
  OptionalTensor D, z, delta_bias, initial_state, seq_idx, cu_seqlens;
  std::string_view discretization;
  bool delta_softplus = false, reverse = false;

  // Not among the public operator's arguments.
  bool is_complex = false;  // of selective_scan_two_sample: B and C are then of the dtype of A
  bool save_chunk_states = false;
  bool has_initial_state = false;  // of the node, which saves the state itself only for a packed call
  OptionalTensor packed_initial_state;
  bool is_dense = false;  // A has a matrix for each channel, or one for all: selective_scan_dense

  bool is_packed() const { return is_present(seq_idx) || is_present(cu_seqlens); }

  auto fields_but_state() { return std::tie(u, delta, A, B, C, D, z, delta_bias); }
  auto fields() {
    return std::tuple_cat(fields_but_state(),
                          std::tie(initial_state, seq_idx, cu_seqlens, discretization, delta_softplus, reverse));
  }
};

struct PlanInputs : Inputs {
  auto fields() {
    return std::tuple_cat(fields_but_state(),
                          std::tie(initial_state, discretization, delta_softplus, seq_idx, cu_seqlens, reverse));
  }
};

struct FwdInputs : Inputs {
  auto fields() {
    return std::tuple_cat(fields_but_state(), std::tie(initial_state, discretization, delta_softplus, save_chunk_states,
                                                       seq_idx, cu_seqlens, reverse));
  }
};

// Raises unless the inputs are as ssm_kernels.selective_scan documents, the values of cu_seqlens apart; returns the method.
// Messages begin with `op`.
Discretization check_inputs_of(const char* op, const Inputs& in, bool (*is_supported)(Discretization) = &is_one_sample,
                               bool lists_all = false);
Discretization check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor out, last_state, chunk_states;

  auto fields() { return std::tie(out, last_state, chunk_states); }
};
// Uninitialized, on the device of u (the Meta device included). This is the one place that knows what forward saves.
FwdOutputs allocate_fwd(const Inputs& in);

// The kernels that forward and backward of a call take.
struct KernelNames {
  std::string forward, backward;

  auto fields() { return std::tie(forward, backward); }
};

// In the order of backward's results.
enum Grad { kGradU, kGradDelta, kGradA, kGradB, kGradC, kGradD, kGradZ, kGradDeltaBias, kGradInitialState, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct BwdInputs {
  OptionalTensor grad_out, grad_last_state;
  // The initial state is in packed_initial_state, or it is the first of chunk_states.
  Inputs in;
  at::Tensor chunk_states;
  NeedsGrad needs_grad{};
  // Arguments of _selective_scan_bwd_out only: backward writes the gradients of z and, if it is given, of delta to these.
  OptionalTensor grad_z, grad_delta;
  // Likewise: backward writes the outputs of forward here, which may be the memory of grad_out.
  OptionalTensor out;
  // Whether nobody reads chunk_states after backward, which may then write partial sums in their place.
  bool reuses_chunk_states = false;

  auto grads() { return std::tie(grad_out, grad_last_state); }
  auto saved() { return std::tie(chunk_states); }
  auto fields() {
    return std::tuple_cat(grads(), in.fields_but_state(),
                          std::tie(chunk_states, in.discretization, in.delta_softplus, in.packed_initial_state, in.seq_idx,
                                   in.cu_seqlens, in.reverse, needs_grad));
  }
};

struct BwdOutInputs : BwdInputs {
  at::Tensor required_grad_z;

  auto fields() { return std::tuple_cat(BwdInputs::fields(), std::tie(required_grad_z, grad_delta, reuses_chunk_states, out)); }
};
using BwdOutGrads = std::array<at::Tensor, kNumGrads - 1>;  // without that of z

// Checks the arguments of backward alone and allocates as allocate_fwd does. Gradients of sequences have the layout of the
// sequence, those of parameters and states are contiguous, and those absent or not needed have no elements. needs_grad alone
// says whether the gradient of the initial state is needed. A gradient that the caller has given memory for is that tensor.
GradTensors allocate_bwd(const BwdInputs& bwd);

// As bwd, into the caller's tensors, which are not among the results: results share no memory with arguments.
template <GradTensors (*bwd)(const BwdInputs&)>
BwdOutGrads bwd_out(BwdOutInputs& in) {
  in.grad_z = in.required_grad_z;
  GradTensors grads = bwd(in);
  if (is_present(in.grad_delta)) grads[kGradDelta] = empty_tensor({0}, in.in.A.options());
  BwdOutGrads others;
  std::move(grads.begin(), grads.begin() + kGradZ, others.begin());
  std::move(grads.begin() + kGradZ + 1, grads.end(), others.begin() + kGradZ);
  return others;
}

// As bwd, for the last reader of chunk_states.
template <GradTensors (*bwd)(const BwdInputs&)>
GradTensors bwd_last(BwdInputs& in) {
  in.reuses_chunk_states = true;
  return bwd(in);
}

// Registers a device's kernels.
template <FwdOutputs (*fwd)(const FwdInputs&), GradTensors (*bwd)(const BwdInputs&)>
void register_kernels(torch::Library& m) {
  implement<fwd>(m, "_selective_scan_fwd");
  implement<bwd>(m, "_selective_scan_bwd");
  implement<&bwd_last<bwd>>(m, "_selective_scan_bwd_last");
  implement<&bwd_out<bwd>>(m, "_selective_scan_bwd_out");
}

// The rows of a packed call, and backward's initial state, in the memory that its parameters point to. Empty for other calls.
struct PackedRows {
  at::Tensor cu_seqlens, fields;
  OptionalTensor initial_state;
};
// Copies cu_seqlens to int64 or, with seq_idx, lists the parts of each batch row that begin where it changes; the host has to
// know the number of parts. With reverse the rows are in the scan's time, which begins at the last step.
PackedRows make_packed_rows(const Inputs& in);

// As kernels see them; of a tensor that is absent, with data null. With reverse, step 0 of a view is the tensor's last step,
// and its stride along time is negative.
SequenceView sequence_view(const OptionalTensor& tensor, Access access, bool reverse = false);
MatrixView matrix_view(const at::Tensor& tensor, Access access, bool reverse = false);
StateView state_view(const OptionalTensor& tensor);
ChannelView channel_view(const OptionalTensor& tensor);

// The parameters that all kernels share.
void fill_params(SelectiveScanParams& params, const Inputs& in, Discretization method, const PackedRows& rows);
SelectiveScanFwdParams make_fwd_params(const Inputs& in, Discretization method, const PackedRows& rows,
                                       const FwdOutputs& outputs);
// `chunk_states` are those of bwd, contiguous. Gradients without elements are absent: their views are empty, their pointers
// null.
SelectiveScanBwdParams make_bwd_params(const BwdInputs& bwd, Discretization method, const PackedRows& rows,
                                       const at::Tensor& chunk_states, const GradTensors& grads);

}  // namespace ssm_kernels::selective_scan
