// Between the operator's dispatcher-facing half (ssd_op.cpp) and its devices: checked arguments, and the tensors that forward
// and backward return.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "common/discretization.h"

namespace ssm_kernels::ssd {

using OptionalTensor = std::optional<at::Tensor>;

// The largest headdim. (dstate's: common/limits.h.)
constexpr int64_t kMaxHeaddim = 256;

// What forward reads. No constructor takes it: most of the members have one type, and are set by name.
struct Inputs {
  at::Tensor x, dt, A, B, C;
  std::optional<c10::SymInt> chunk_size;
  OptionalTensor D, z, dt_bias;
  bool dt_softplus = false;
  double dt_min = 0, dt_max = 0;
  OptionalTensor initial_states, seq_idx, cu_seqlens;
  std::string_view discretization;  // of the caller's string

  // How many states there are: one for each entry of the batch or, where it is packed, for each sequence.
  c10::SymInt sequences() const;
};

// Raises unless the inputs are as ssm_kernels.ssd_chunk_scan documents, the values of cu_seqlens apart; returns the method.
Discretization check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor out, final_states;
};
// Uninitialized, on the device of x (the Meta device included).
FwdOutputs allocate_fwd(const Inputs& in);

enum Grad { kGradX, kGradDt, kGradA, kGradB, kGradC, kGradD, kGradZ, kGradDtBias, kGradInitialStates, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

// What backward reads.
struct BwdInputs {
  OptionalTensor grad_out, grad_final_states;
  Inputs in;
  NeedsGrad needs_grad = {};
  // Where gradients of sequences shall be written, for a caller in C++: columns of a wider tensor, for instance.
  std::array<OptionalTensor, kNumGrads> targets;
};

// Checks what backward is given beside the inputs, then as allocate_fwd. Gradients of sequences are their targets, or have the
// layout of the sequence, those of parameters and states are contiguous, and those absent or not needed have no elements.
GradTensors allocate_bwd(const BwdInputs& bwd);

using FwdResult = std::tuple<at::Tensor, at::Tensor>;
using FwdSignature = FwdResult(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               std::optional<c10::SymInt>, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               bool, double, double, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               std::string_view);
using BwdResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BwdSignature = BwdResult(const OptionalTensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&, std::optional<c10::SymInt>,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool, double, double,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, std::string_view,
                               NeedsGrad);

// For CUDA tensors (entry.cpp); for others chunked_scan.h has them. ssd_op.cpp registers both.
FwdResult fwd_cuda(const Inputs& in);
BwdResult bwd_cuda(const BwdInputs& bwd);

// Forward and backward without the dispatcher, for the operators that are made of it. On the device of x, Meta included.
FwdResult forward(const Inputs& in);
BwdResult backward(const BwdInputs& bwd);

// The arguments of FwdSignature, and of BwdSignature, under their names: the one place of each where their order counts.
Inputs name_inputs(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                   std::optional<c10::SymInt> chunk_size, const OptionalTensor& D, const OptionalTensor& z,
                   const OptionalTensor& dt_bias, bool dt_softplus, double dt_min, double dt_max,
                   const OptionalTensor& initial_states, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                   std::string_view discretization);
BwdInputs name_inputs(const OptionalTensor& grad_out, const OptionalTensor& grad_final_states, const at::Tensor& x,
                      const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                      std::optional<c10::SymInt> chunk_size, const OptionalTensor& D, const OptionalTensor& z,
                      const OptionalTensor& dt_bias, bool dt_softplus, double dt_min, double dt_max,
                      const OptionalTensor& initial_states, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                      std::string_view discretization, NeedsGrad needs_grad);

// A kernel for the dispatcher, whose many arguments come as one struct: Unpacked<FwdSignature>::kernel<&function>, where
// function is FwdResult(const Inputs&), or likewise for backward.
template <typename Signature>
struct Unpacked;
template <typename Result, typename... Arguments>
struct Unpacked<Result(Arguments...)> {
  using Struct = std::conditional_t<std::is_same_v<Result, FwdResult>, Inputs, BwdInputs>;

  template <Result (*function)(const Struct&)>
  static Result kernel(Arguments... arguments) {
    return function(name_inputs(arguments...));
  }
};

}  // namespace ssm_kernels::ssd
