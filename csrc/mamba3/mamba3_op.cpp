// mamba3_chunk_scan, Mamba-3's scan, on every device: checks, allocation, Meta, Autograd and Autocast.
//
// With theta_t = theta_{t-1} + pi tanh(angles_t) dt_t, k_t = R(theta_t) (B_t + B_bias), q_t = R(theta_t) (C_t + C_bias) and
// lambda_t = sigmoid(trap_t), a step is
//
//   S_t = e^(A_t dt_t) (S_{t-1} + (1 - lambda_t) dt_t x_{t-1} k_{t-1}^T) + lambda_t dt_t x_t k_t^T       y_t = S_t q_t + D x_t
//
// The rotation (rotation.h) is first; then it is the chunked scan with two input samples a step and the rule exp_trapezoidal
// (ssd/two_sample_op.h), whose B and C are k and q by head, and whose A has a value a step. The previous sample before the
// first step is (k, x) of the initial states. Sums have the accumulation type; on CUDA some operands of products
// have that of x (scan.h). Autograd saves the inputs; backward rotates again, and takes some rows of the batch at a time.
//
// With ranks (MIMO), B, C, k and q have R rows a step, v^r_t = x_t mimo_x^r, x_t k_t^T becomes sum_r v^r_t (k^r_t)^T, and the
// outputs are y^r_t = S_t q^r_t + D v^r_t. Norm, gate and sum of the ranks are part of the scan: PyTorch matmuls
// (ssd/aten/ranks.h), or on CUDA the kernels of one sample a step (ssd/cuda/ranks.cpp).
//
// k and q are in the frame of the sequence: theta counts from the beginning of the sequence, or from the given angle. Only
// differences of phases have an effect on y, but the last k and S are states in this frame.

#include "mamba3/mamba3_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "common/integers.h"
#include "common/limits.h"
#include "mamba3/rotation.h"
#include "mamba3/scan.h"
#include "norm/norm_call.h"
#include "ssd/two_sample_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/debug_options.h"
#include "torch/packed_sequences.h"
#include "torch/schemas.h"

#ifdef SSM_KERNELS_WITH_CUDA
#include "cuda/device.h"
#endif

namespace ssm_kernels::mamba3 {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // Mamba-3's scan. The norm, of each head's output, is before the gate. reverse is refused by name.
  schemas.def(
      "mamba3_chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor trap, Tensor angles, *, "
      "Tensor? B_bias=None, Tensor? C_bias=None, Tensor? D=None, Tensor? z=None, Tensor? mimo_x=None, Tensor? mimo_z=None, "
      "Tensor? mimo_out=None, Tensor? norm_weight=None, Tensor? initial_angle=None, Tensor? initial_ssm=None, "
      "Tensor? initial_k=None, Tensor? initial_x=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, float norm_eps=1e-05, "
      "str rotate='pairs', SymInt? chunk_size=None, bool reverse=False) "
      "-> (Tensor out, Tensor final_angle, Tensor final_ssm, Tensor final_k, Tensor final_x)");
  const std::string arguments =
      "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor trap, Tensor angles, Tensor? B_bias, Tensor? C_bias, "
      "Tensor? D, Tensor? z, Tensor? mimo_x, Tensor? mimo_z, Tensor? mimo_out, Tensor? norm_weight, Tensor? initial_angle, "
      "Tensor? initial_ssm, Tensor? initial_k, Tensor? initial_x, Tensor? seq_idx, Tensor? cu_seqlens, float norm_eps, "
      "str rotate, SymInt? chunk_size, bool wide_out, bool premultiplied";
  const std::string results = ") -> (Tensor out, Tensor final_angle, Tensor final_ssm, Tensor final_k, Tensor final_x)";
  // The differentiable form, without norm unless there are ranks. With wide_out the output has the accumulation type; with
  // premultiplied, A is A dt.
  schemas.def("_mamba3_chunk_scan(" + arguments + results);
  schemas.kernels("_mamba3_chunk_scan_fwd(" + arguments + results);
  // Gradients that are absent or not needed have no elements.
  schemas.kernels(
      "_mamba3_chunk_scan_bwd(Tensor? grad_out, Tensor? grad_final_angle, Tensor? grad_final_ssm, Tensor? grad_final_k, "
      "Tensor? grad_final_x, " +
      arguments +
      ", bool[19] needs_grad) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, "
      "Tensor grad_trap, Tensor grad_angles, Tensor grad_B_bias, Tensor grad_C_bias, Tensor grad_D, Tensor grad_z, "
      "Tensor grad_mimo_x, Tensor grad_mimo_z, Tensor grad_mimo_out, Tensor grad_norm_weight, Tensor grad_initial_angle, "
      "Tensor grad_initial_ssm, Tensor grad_initial_k, Tensor grad_initial_x)");
}

namespace {

constexpr char kOp[] = "mamba3_chunk_scan";
constexpr char kSequence[] = "(batch, seqlen, heads, headdim)";
constexpr char kSteps[] = "(batch, seqlen, heads)";
constexpr char kMatrix[] = "(batch, seqlen, groups, dstate)", kRankedMatrix[] = "(batch, seqlen, ranks, groups, dstate)";

using Shape = std::vector<c10::SymInt>;

c10::SymInt sequences_of(const Inputs& in) { return count_states(in.cu_seqlens, in.x.sym_size(0)); }
Shape angle_shape(const Inputs& in) { return {sequences_of(in), in.x.sym_size(2), in.angles.sym_size(-1)}; }
Shape ssm_shape(const Inputs& in) { return {sequences_of(in), in.x.sym_size(2), in.x.sym_size(3), in.B.sym_size(-1)}; }
Shape k_shape(const Inputs& in) {
  if (in.has_ranks()) return {sequences_of(in), in.x.sym_size(2), in.B.sym_size(2), in.B.sym_size(4)};
  return {sequences_of(in), in.x.sym_size(2), in.B.sym_size(3)};
}
Shape x_shape(const Inputs& in) { return {sequences_of(in), in.x.sym_size(2), in.x.sym_size(3)}; }

std::string state_axes(const Inputs& in, const char* axes) {
  return std::string(is_present(in.cu_seqlens) ? "(sequences, heads, " : "(batch, heads, ") + axes + ")";
}

// The four states or their gradients, whose names begin with `prefix`.
void check_states(const ArgumentChecks& checks, const Inputs& in, const std::string& prefix, const OptionalTensor& angle,
                  const OptionalTensor& ssm, const OptionalTensor& k, const OptionalTensor& x) {
  const auto check = [&](const char* name, const OptionalTensor& tensor, const char* axes, const Shape& shape,
                         at::ScalarType dtype) {
    checks.tensor((prefix + name).c_str(), tensor, state_axes(in, axes).c_str(), shape, dtype);
  };
  check("angle", angle, "angles", angle_shape(in), in.wide());
  check("ssm", ssm, "headdim, dstate", ssm_shape(in), in.wide());
  check("k", k, in.has_ranks() ? "ranks, dstate" : "dstate", k_shape(in), in.wide());
  check("x", x, "headdim", x_shape(in), in.x.scalar_type());
}

// The biases and what only calls with ranks have.
void check_ranks(const ArgumentChecks& checks, const Inputs& in) {
  const c10::SymInt heads = in.x.sym_size(2), headdim = in.x.sym_size(3), dstate = in.B.sym_size(-1);
  const auto check_bias = [&](const char* name, const OptionalTensor& bias) {
    if (is_present(bias) && in.has_ranks() && bias->dim() == 3) {
      checks.tensor(name, bias, "(heads, ranks, dstate)", {heads, in.B.sym_size(2), dstate}, in.wide());
    } else {
      checks.tensor(name, bias, in.has_ranks() ? "(heads, dstate) or (heads, ranks, dstate)" : "(heads, dstate)",
                    {heads, dstate}, in.wide());
    }
  };
  check_bias("B_bias", in.B_bias);
  check_bias("C_bias", in.C_bias);
  for (const auto& [name, factor] :
       {std::pair<const char*, const OptionalTensor&>("mimo_x", in.mimo_x), {"mimo_z", in.mimo_z}, {"mimo_out", in.mimo_out}}) {
    if (!is_present(factor)) continue;
    TORCH_CHECK_VALUE(in.has_ranks(), kOp, ": expected ", name, " with B and C of shape ", kRankedMatrix,
                      " only, got it with B of shape ", in.B.sym_sizes());
    checks.tensor(name, factor, "(heads, ranks, headdim)", {heads, in.B.sym_size(2), headdim}, in.wide());
  }
  TORCH_CHECK_VALUE(is_present(in.z) || !is_present(in.mimo_z), kOp, ": expected mimo_z with z only, got it without z");
  checks.tensor("norm_weight", in.norm_weight, "(heads, headdim)", {heads, headdim}, in.wide());
}

void check_inputs(const Inputs& in) {
  const ArgumentChecks checks(kOp, "x", in.x);
  checks.rank("x", in.x, 4, kSequence);
  const bool has_ranks = in.has_ranks();
  if (!has_ranks) checks.rank("B", in.B, 4, "(batch, seqlen, groups, dstate) or (batch, seqlen, ranks, groups, dstate)");
  const c10::SymInt batch = in.x.sym_size(0), seqlen = in.x.sym_size(1), heads = in.x.sym_size(2), headdim = in.x.sym_size(3);
  const c10::SymInt groups = in.B.sym_size(-2), dstate = in.B.sym_size(-1);
  const at::ScalarType dtype = in.x.scalar_type();
  TORCH_CHECK_VALUE(!has_ranks || in.B.sym_size(2) >= 1, kOp, ": expected at least one rank in B and C, got ",
                    in.B.sym_sizes());
  TORCH_CHECK_VALUE(headdim >= 1 && headdim <= ssd::kMaxHeaddim, kOp, ": expected headdim from 1 to ", ssd::kMaxHeaddim,
                    ", got ", headdim);
  for (const auto& [name, tensor] : {std::pair<const char*, const at::Tensor&>("dt", in.dt), {"A", in.A}, {"trap", in.trap}}) {
    checks.parameter(name, tensor, kSteps, {batch, seqlen, heads});
  }
  Shape shape = {batch, seqlen, groups, dstate};
  if (has_ranks) shape.insert(shape.begin() + 2, in.B.sym_size(2));
  checks.tensor("B", in.B, has_ranks ? kRankedMatrix : kMatrix, shape, dtype);
  TORCH_CHECK_VALUE(groups > 0 && heads % groups == 0, kOp, ": expected the groups of B and C to divide heads = ", heads,
                    ", got ", groups);
  TORCH_CHECK_VALUE(dstate >= 1 && dstate <= kMaxDstate, kOp, ": expected dstate from 1 to ", kMaxDstate, ", got ", dstate);
  checks.tensor("C", in.C, has_ranks ? kRankedMatrix : kMatrix, in.B.sym_sizes(), dtype);
  const int64_t rank = in.angles.dim();
  checks.rank("angles", in.angles, rank == 4 ? 4 : 3, "(batch, seqlen, angles) or (batch, seqlen, heads, angles)");
  const c10::SymInt angles = in.angles.sym_size(-1);
  if (rank == 3) {
    checks.parameter("angles", in.angles, "(batch, seqlen, angles)", {batch, seqlen, angles});
  } else {
    checks.parameter("angles", in.angles, "(batch, seqlen, heads, angles)", {batch, seqlen, heads, angles});
  }
  check_rotation(kOp, in.rotate, angles, dstate);
  check_ranks(checks, in);
  if (is_present(in.D)) {
    if (in.D->dim() == 2) {
      checks.tensor("D", in.D, "(heads, headdim)", {heads, headdim}, in.wide());
    } else {
      checks.tensor("D", in.D, "(heads,) or (heads, headdim)", {heads}, in.wide());
    }
  }
  checks.tensor("z", in.z, kSequence, in.x.sym_sizes(), dtype);
  if (in.chunk_size.has_value()) {
    TORCH_CHECK_VALUE(*in.chunk_size >= 1, kOp, ": expected chunk_size of at least 1, got ", *in.chunk_size);
  }
  check_sequences(checks, in.seq_idx, in.cu_seqlens, batch, seqlen);
  const int given =
      is_present(in.initial_angle) + is_present(in.initial_ssm) + is_present(in.initial_k) + is_present(in.initial_x);
  TORCH_CHECK_VALUE(given == 0 || given == 4, kOp, ": expected all four initial states, angle, ssm, k and x, or none, got ",
                    given);
  check_states(checks, in, "initial_", in.initial_angle, in.initial_ssm, in.initial_k, in.initial_x);
}

Outputs allocate_fwd(const Inputs& in) {
  const at::TensorOptions options = in.wide_options();
  return {empty_tensor_like(in.wide_out ? in.x.to(in.wide()) : in.x), empty_tensor(angle_shape(in), options),
          empty_tensor(ssm_shape(in), options), empty_tensor(k_shape(in), options), empty_tensor(x_shape(in), in.x.options())};
}

GradTensors allocate_bwd(const BwdInputs& bwd) {
  Inputs in = bwd.in;
  const ArgumentChecks checks("mamba3_chunk_scan backward", "x", in.x);
  checks.tensor("grad_out", bwd.grad_out, kSequence, in.x.sym_sizes(), in.wide_out ? in.wide() : in.x.scalar_type());
  check_states(checks, in, "grad_final_", bwd.grad_final_angle, bwd.grad_final_ssm, bwd.grad_final_k, bwd.grad_final_x);
  GradTensors grads;
  int next = 0;
  const auto allocate = [&](const auto& input) {
    const bool is_needed = is_present(input) && bwd.needs_grad[next];
    // Sequences have their layout, parameters and states are contiguous.
    const bool is_sequence = next <= kGradAngles || next == kGradZ;
    const at::Tensor& like = or_undefined(input);
    grads[next++] = !is_needed    ? empty_tensor({0}, in.wide_options())
                    : is_sequence ? empty_tensor_like(like)
                                  : empty_contiguous_like(like);
  };
  std::apply([&](const auto&... inputs) { (allocate(inputs), ...); }, in.tensors());
  return grads;
}

bool has_no_steps(const Inputs& in) { return in.x.size(1) == 0 || in.x.size(2) == 0; }

// A scan without steps, or without heads, returns the states that it got.
Outputs without_steps(const Inputs& in, Outputs outputs) {
  const auto copy = [](const at::Tensor& target, const OptionalTensor& source) {
    if (is_present(source)) {
      at::Tensor(target).copy_(*source);
    } else {
      at::Tensor(target).zero_();
    }
  };
  copy(outputs.final_angle, in.initial_angle);
  at::Tensor(outputs.final_angle).sub_((outputs.final_angle * (1 / (2 * kPi))).round_(), 2 * kPi);  // from -pi to pi
  copy(outputs.final_ssm, in.initial_ssm);
  copy(outputs.final_k, in.initial_k);
  copy(outputs.final_x, in.initial_x);
  return outputs;
}

// Checks the values of cu_seqlens. On CUDA the host waits for them: once, in forward, unless a CUDA graph is being captured.
void check_values(const Inputs& in, bool is_backward) {
  if (!is_present(in.cu_seqlens)) return;
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.x.is_cuda() && (is_backward || cuda::is_capturing())) return;
#endif
  check_cu_seqlens_values(kOp, in.cu_seqlens->cpu(), in.x.size(1));
}

// The last k of each sequence, shaped as the state.
at::Tensor last_k(const Inputs& in, const ssd::TwoSampleInputs& scan, const at::Tensor& k) {
  if (!in.has_ranks()) return ssd::last_steps(scan, k, in.initial_k);
  OptionalTensor before;
  if (is_present(in.initial_k)) before = ranks_first(*in.initial_k, 1).flatten(1, 2);
  return ranks_first(ssd::last_steps(scan, k.flatten(2, 3), before).unflatten(1, {in.ranks(), -1}), 1);
}

Outputs mamba3_fwd(const Inputs& in) {
  if (in.x.is_meta()) return meta<check_inputs, allocate_fwd>(in);
  check_inputs(in);
  TORCH_INTERNAL_ASSERT(in.has_ranks() || !is_present(in.norm_weight), "the public operator norms a scan without ranks");
  check_values(in, /*is_backward=*/false);
  if (has_no_steps(in)) return without_steps(in, allocate_fwd(in));
  if (rotates_in_scan(in)) return rotating_scan(in);
  const Rotation rotation = rotate_for_scan(in, Pass::kForward);
  const ssd::Ranks ranks = ranks_of(in);
  const ssd::TwoSampleInputs scan = scan_of(in, rotation, ranks, Pass::kForward);
  const ssd::FwdOutputs found = ssd::two_sample_scan(scan, kRule);
  if (rotates_by_cuda_kernels(in)) {
    at::Tensor out = found.out;
    if (!in.wide_out && out.scalar_type() != in.x.scalar_type()) {
      out = empty_tensor_like(in.x);  // not out.to(), which has other strides
      out.copy_(found.out);
    }
    const at::Tensor final_x = ssd::last_steps(scan, in.x, in.initial_x).contiguous();
    return {out, rotation.final_angle, found.final_states, rotation.final_k, final_x};
  }
  const Outputs outputs = allocate_fwd(in);
  at::Tensor(outputs.final_x).copy_(ssd::last_steps(scan, in.x, in.initial_x));
  at::Tensor(outputs.out).copy_(found.out);
  at::Tensor(outputs.final_angle).copy_(rotation.phases * (2 * kPi));
  at::Tensor(outputs.final_k).copy_(last_k(in, scan, rotation.k));
  return {outputs.out, outputs.final_angle, found.final_states, outputs.final_k, outputs.final_x};
}

// Adds the gradient of last_steps() to that of the tensor that a sequence without steps takes.
void add_last_of_empty(const Inputs& in, const OptionalTensor& grad, const at::Tensor& before) {
  if (!is_present(grad) || !is_present(in.cu_seqlens) || before.numel() == 0) return;
  before.add_(at::where(have_steps(in, *grad), at::zeros_like(*grad), *grad));
}

// Adds the gradient of last_steps() to that of the steps, and to that of the tensor that a sequence without steps takes.
void add_last(const Inputs& in, const at::Tensor& steps, const OptionalTensor& grad, const at::Tensor& before) {
  if (!is_present(grad)) return;
  if (!is_present(in.cu_seqlens)) {
    steps.select(1, -1).add_(*grad);
    return;
  }
  const at::Tensor ends = in.cu_seqlens->to(at::kLong).slice(0, 1), has_steps = have_steps(in, *grad);
  const at::Tensor none = at::zeros_like(*grad), wide = grad->to(steps.scalar_type());
  steps.select(0, 0).index_add_(0, (ends - 1).clamp(0, in.x.size(1) - 1), at::where(has_steps, wide, none));
  add_last_of_empty(in, grad, before);
}

// Backward of a scan without steps: states that it returns are those that it got.
void adjoint_without_steps(const BwdInputs& bwd, const GradTensors& grads) {
  for (const at::Tensor& grad : grads) grad.zero_();
  const auto pass = [&](int grad, const OptionalTensor& from) {
    if (grads[grad].numel() > 0 && is_present(from)) grads[grad].copy_(*from);
  };
  pass(kGradInitialAngle, bwd.grad_final_angle);
  pass(kGradInitialSsm, bwd.grad_final_ssm);
  pass(kGradInitialK, bwd.grad_final_k);
  pass(kGradInitialX, bwd.grad_final_x);
}

// The sum over the heads of a group.
at::Tensor of_groups(const Inputs& in, const at::Tensor& of_heads) {
  const int64_t heads = in.x.size(2), groups = in.B.size(-2);
  return heads == groups ? of_heads : of_heads.unflatten(-2, {groups, heads / groups}).sum(-2);
}

// The gradient of a bias from that of its rows, summed over batch and time in float64.
at::Tensor of_bias(const Inputs& in, const at::Tensor& grad, const at::Tensor& bias) {
  const at::Tensor sum = grad.sum(at::IntArrayRef{0, 1}, /*keepdim=*/false, at::kDouble);
  if (!in.has_ranks()) return sum;
  return bias.dim() == 3 ? ranks_first(sum, 0) : sum.sum(0);
}

// The sums that the gradients of the ranks' factors are added to.
ssd::RankGrads zero_rank_grads(const GradTensors& grads) {
  const auto zeros = [&](int grad) {
    return grads[grad].numel() > 0 ? at::zeros_like(grads[grad], at::kDouble) : at::Tensor();
  };
  return {zeros(kGradMimoX), zeros(kGradMimoZ), zeros(kGradMimoOut), zeros(kGradNormWeight)};
}

// The gradient of the last x before the sequences, from that of its v; adds that of mimo_x to a sum.
at::Tensor inputs_before_adjoint(const Inputs& in, const at::Tensor& grad, const at::Tensor& sum_mimo_x) {
  if (sum_mimo_x.defined()) {
    const at::Tensor of_factors = grad * in.initial_x->to(in.wide()).unsqueeze(1);
    sum_mimo_x.add_(ranks_first(of_factors.sum(0, /*keepdim=*/false, at::kDouble), 0));
  }
  return (is_present(in.mimo_x) ? grad * ranks_first(*in.mimo_x, 0) : grad).sum(1);
}

// Backward of all rows of the batch at once.
GradTensors adjoint(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  GradTensors grads = allocate_bwd(bwd);
  std::array<bool, kNumGrads> have_elements;
  for (int grad = 0; grad < kNumGrads; ++grad) have_elements[grad] = grads[grad].numel() > 0;
  const auto needs = [&](int grad) { return have_elements[grad]; };
  if (has_no_steps(in)) {
    adjoint_without_steps(bwd, grads);
    return grads;
  }
  const auto cast = [&](const OptionalTensor& tensor) {
    return is_present(tensor) ? OptionalTensor(tensor->to(scan_dtype(in, Pass::kBackward))) : OptionalTensor();
  };
  const bool has_kernels = rotates_by_cuda_kernels(in);
  // The scan's gradients of x and z are the results if their type is the same.
  if (has_kernels && scan_dtype(in, Pass::kBackward) == in.x.scalar_type()) {
    for (const int grad : {kGradX, kGradZ}) {
      if (needs(grad)) grads[grad] = at::Tensor();
    }
  }
  Rotation rotation = rotate_for_scan(in, Pass::kBackward);
  const ssd::Ranks ranks = ranks_of(in);
  const ssd::RankGrads rank_grads = zero_rank_grads(grads);
  ssd::TwoSampleBwdInputs of_scan{
      cast(bwd.grad_out), bwd.grad_final_ssm, scan_of(in, rotation, ranks, Pass::kBackward), {}, &rank_grads, true};
  const bool needs_phases = needs(kGradAngles) || needs(kGradDt) || needs(kGradInitialAngle);
  const bool needs_rows =
      needs_phases || needs(kGradB) || needs(kGradC) || needs(kGradBBias) || needs(kGradCBias) || needs(kGradInitialK);
  const auto ask = [&](int grad, bool is_needed) { of_scan.needs_grad[grad] = is_needed; };
  ask(ssd::kGradX, needs(kGradX) || needs(kGradInitialX) || needs(kGradMimoX));
  ask(ssd::kGradDt, needs(kGradDt));
  ask(ssd::kGradA, needs(kGradA));
  ask(ssd::kGradB, needs_rows);
  ask(ssd::kGradC, needs_rows);
  ask(ssd::kGradD, needs(kGradD));
  ask(ssd::kGradZ, needs(kGradZ));
  ask(ssd::kGradInitialStates, needs(kGradInitialSsm));
  ask(ssd::kGradLam, needs(kGradTrap));
  ask(ssd::kGradPreviousX, needs(kGradInitialX) || needs(kGradMimoX));
  ask(ssd::kGradPreviousB, needs(kGradInitialK));
  const ssd::TwoSampleGrads found = ssd::two_sample_scan_adjoint(of_scan, kRule);
  const at::Tensor &grad_x = found[ssd::kGradX], &grad_k = found[ssd::kGradB], &grad_q = found[ssd::kGradC];
  at::Tensor grad_initial_x = found[ssd::kGradPreviousX], grad_initial_k = found[ssd::kGradPreviousB];
  if (in.has_ranks()) {
    if (grad_initial_x.numel() > 0) grad_initial_x = inputs_before_adjoint(in, grad_initial_x, rank_grads.x);
    if (grad_initial_k.numel() > 0) grad_initial_k = ranks_first(grad_initial_k, 1);
  }
  if (of_scan.needs_grad[ssd::kGradX]) add_last(in, grad_x, bwd.grad_final_x, grad_initial_x);
  if (needs_rows) {
    if (has_kernels) {
      add_last_of_empty(in, bwd.grad_final_k, grad_initial_k);  // the kernels add the others
    } else {
      add_last(in, in.has_ranks() ? ranks_first(grad_k, 2) : grad_k, bwd.grad_final_k, grad_initial_k);
    }
  }
  const std::pair<int, at::Tensor> of_one[] = {{kGradX, grad_x},
                                               {kGradA, found[ssd::kGradA]},
                                               {kGradTrap, found[ssd::kGradLam]},
                                               {kGradD, found[ssd::kGradD]},
                                               {kGradZ, found[ssd::kGradZ]},
                                               {kGradInitialSsm, found[ssd::kGradInitialStates]},
                                               {kGradMimoX, rank_grads.x},
                                               {kGradMimoZ, rank_grads.z},
                                               {kGradMimoOut, rank_grads.out},
                                               {kGradNormWeight, rank_grads.norm_weight},
                                               {kGradInitialK, grad_initial_k},
                                               {kGradInitialX, grad_initial_x}};
  for (const auto& [grad, tensor] : of_one) {
    if (!grads[grad].defined()) {
      grads[grad] = tensor;
    } else if (needs(grad)) {
      grads[grad].copy_(tensor);
    }
  }
  if (!needs_rows) return grads;
  if (has_kernels) {
    rotate_adjoint_cuda(in, rotation, {grad_k, grad_q, bwd.grad_final_angle, bwd.grad_final_k, found[ssd::kGradDt]}, grads);
    return grads;
  }

  if (is_present(bwd.grad_final_angle)) {
    rotation.phases = bwd.grad_final_angle->to(at::kDouble).contiguous().clone();
  } else {
    rotation.phases = at::zeros_like(rotation.phases);  // not in place: they may be a view of the last turns
  }
  rotate_adjoint(in, rotation, grad_k, grad_q);
  if (needs(kGradB)) grads[kGradB].copy_(of_groups(in, grad_k));
  if (needs(kGradC)) grads[kGradC].copy_(of_groups(in, grad_q));
  if (needs(kGradBBias)) grads[kGradBBias].copy_(of_bias(in, grad_k, *in.B_bias));
  if (needs(kGradCBias)) grads[kGradCBias].copy_(of_bias(in, grad_q, *in.C_bias));
  if (needs(kGradInitialAngle)) grads[kGradInitialAngle].copy_(rotation.phases);
  const bool is_shared = rotation.rates.dim() == 3;
  const at::Tensor rates = is_shared ? rotation.rates.unsqueeze(2) : rotation.rates;
  if (needs(kGradAngles)) {
    const at::Tensor of_rates = rotation.turns * rotation.sizes.unsqueeze(-1);
    const at::Tensor summed = is_shared ? of_rates.sum(2) : of_rates;
    grads[kGradAngles].copy_(summed * (kPi * (1 - rotation.rates * rotation.rates)));
  }
  if (needs(kGradDt)) grads[kGradDt].copy_((rotation.turns * rates).sum(-1) * kPi + found[ssd::kGradDt]);
  return grads;
}

// Whether a tensor of Inputs::tensors() has rows of the batch; the others are parameters.
constexpr bool has_batch(int tensor) { return tensor <= kGradAngles || tensor == kGradZ || tensor >= kGradInitialAngle; }

// The rows of the batch that backward takes at once: k, q and their gradients then take at most kMostBytes.
int64_t rows_at_once(const Inputs& in) {
  constexpr int64_t kMostBytes = int64_t(512) << 20;
  const int64_t batch = in.x.size(0);
  if (is_present(in.cu_seqlens) || batch < 2) return batch;
  const int64_t bytes_of_element = c10::elementSize(scan_dtype(in, Pass::kBackward)) + c10::elementSize(in.wide());
  const int64_t bytes = 2 * in.x.size(1) * in.x.size(2) * in.ranks() * in.B.size(-1) * bytes_of_element;
  const int64_t most = std::min(kMostBytes, debug_option(DebugOption::kSsdWorkspaceBytes)) / std::max<int64_t>(1, bytes);
  return ceil_div(batch, ceil_div(batch, std::max<int64_t>(1, most)));
}

GradTensors mamba3_bwd(const BwdInputs& bwd) {
  if (bwd.in.x.is_meta()) return meta<check_inputs, allocate_bwd>(bwd);
  check_inputs(bwd.in);
  check_values(bwd.in, /*is_backward=*/true);
  const int64_t batch = bwd.in.x.size(0), at_once = rows_at_once(bwd.in);
  if (at_once >= batch) return adjoint(bwd);
  const GradTensors grads = allocate_bwd(bwd);
  for (int64_t row = 0; row < batch; row += at_once) {
    const int64_t rows = std::min(at_once, batch - row);
    BwdInputs part = bwd;
    const auto take_rows = [&](auto& tensor) {
      if (is_present(tensor)) tensor = or_undefined(tensor).narrow(0, row, rows);
    };
    int next = 0;
    const auto take = [&](auto& tensor) {
      if (has_batch(next++)) take_rows(tensor);
    };
    std::apply([&](auto&... tensors) { (take(tensors), ...); }, part.in.tensors());
    std::apply([&](auto&... tensors) { (take_rows(tensors), ...); }, part.grads());
    take_rows(part.in.seq_idx);
    const GradTensors found = adjoint(part);
    for (int grad = 0; grad < kNumGrads; ++grad) {
      if (grads[grad].numel() == 0) continue;
      const at::Tensor target = has_batch(grad) ? grads[grad].narrow(0, row, rows) : grads[grad];
      if (has_batch(grad) || row == 0) {
        target.copy_(found[grad]);
      } else {
        target.add_(found[grad]);
      }
    }
  }
  return grads;
}

// Saves the inputs and nothing else.
struct Mamba3ChunkScan : DifferentiableOp<Mamba3ChunkScan, BwdInputs, Outputs> {
  static constexpr char kSchema[] = "ssm_kernels::_mamba3_chunk_scan";
  static constexpr char kForward[] = "ssm_kernels::_mamba3_chunk_scan_fwd";
  static constexpr char kBackward[] = "ssm_kernels::_mamba3_chunk_scan_bwd";

  static const char* name(const Inputs&) { return kOp; }
  static auto differentiable(Inputs& in) { return in.tensors(); }

  // Sequences and the last input in the autocast dtype; gates, phases, parameters and other states in float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.x, in.B, in.C, in.z, in.initial_x);
    to.to_float(in.dt, in.A, in.trap, in.angles, in.B_bias, in.C_bias, in.D, in.mimo_x, in.mimo_z, in.mimo_out, in.norm_weight,
                in.initial_angle, in.initial_ssm, in.initial_k);
  }
};

// The public operator: refuses what is not supported, and norms the output. A composition of operators, so that autograd, vmap
// and exporters know only those.
struct PublicMamba3Scan {
  static constexpr char kSchema[] = "ssm_kernels::mamba3_chunk_scan";
  static constexpr bool kIsPublic = true;
  struct Inputs : mamba3::Inputs {
    bool reverse = false;

    auto fields() {
      return std::tie(x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, mimo_x, mimo_z, mimo_out, norm_weight, initial_angle,
                      initial_ssm, initial_k, initial_x, seq_idx, cu_seqlens, norm_eps, rotate, chunk_size, reverse);
    }
  };
  using Result = Outputs;

  static void cast(Inputs& in, const Autocast& to) {
    operator_of<PublicMamba3Scan>().check(in);
    Mamba3ChunkScan::cast(in, to);
  }

  static Outputs call(Inputs& in) {
    operator_of<PublicMamba3Scan>().check(in);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !in.reverse, kOp,
        ": reverse is not supported: phases grow from the first step of a sequence, and a step reads the "
        "sample before it, so that states of a reversed scan could not continue in decoding; flip the "
        "arguments along seqlen instead");
    check_norm_eps(kOp, in.norm_eps);
    if (!is_present(in.norm_weight) || in.has_ranks()) return operator_of<Mamba3ChunkScan>()(in);
    check_inputs(in);
    const c10::SymInt heads = in.x.sym_size(2), headdim = in.x.sym_size(3);
    mamba3::Inputs scan = in;
    scan.z.reset();
    scan.norm_weight.reset();
    scan.wide_out = true;
    Outputs outputs = operator_of<Mamba3ChunkScan>()(scan);
    static const Operator<at::Tensor, norm::GatedInputs> norm_gated("ssm_kernels::_norm_gated");
    norm::GatedInputs normed;
    normed.x = outputs.out.flatten(2);
    normed.weight = in.norm_weight->flatten();
    if (is_present(in.z)) normed.z = in.z->to(in.wide()).flatten(2);
    normed.eps = in.norm_eps;
    normed.group_size = headdim;
    normed.norm_before_gate = true;
    normed.activation = "silu";
    outputs.out = norm_gated(normed).unflatten_symint(2, {heads, headdim}).to(in.x.scalar_type());
    return outputs;
  }
};

}  // namespace

void check_norm_eps(const char* op, double norm_eps) {
  TORCH_CHECK_VALUE(norm_eps >= 0 && std::isfinite(norm_eps), op, ": expected a finite norm_eps of at least 0, got ", norm_eps);
}

void check_rotation(const char* op, std::string_view rotate, const c10::SymInt& angles, const c10::SymInt& dstate) {
  TORCH_CHECK_VALUE(rotate == "pairs" || rotate == "halves", op, ": expected rotate \"pairs\" or \"halves\", got \"", rotate,
                    "\"");
  TORCH_CHECK_VALUE(rotate == "pairs" || dstate % 2 == 0, op, ": expected an even dstate with rotate \"halves\", got ", dstate);
  TORCH_CHECK_VALUE(2 * angles <= dstate, op, ": expected at most dstate / 2 angles, got ", angles, " with dstate = ", dstate);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  implement<&PublicMamba3Scan::call>(m, PublicMamba3Scan::kSchema);
}

SSM_DIFFERENTIABLE_OPERATOR(Mamba3ChunkScan)
SSM_AUTOCAST_OPERATOR(PublicMamba3Scan)

// For every device, Meta included.
TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  implement<&mamba3_fwd>(m, "_mamba3_chunk_scan_fwd");
  implement<&mamba3_bwd>(m, "_mamba3_chunk_scan_bwd");
}

}  // namespace ssm_kernels::mamba3
