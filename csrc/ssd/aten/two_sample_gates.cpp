#include "ssd/aten/two_sample_gates.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <type_traits>
#include <utility>

#include "common/two_sample_discretization.h"
#include "torch/packed_sequences.h"
#include "torch/tensor_math.h"

namespace ssm_kernels::ssd {
namespace {

// v_{t+1} for each t of (batch, seqlen, ...) in the scan's order, or v_{t-1}, and zero beyond the steps.
at::Tensor shifted(const at::Tensor& v, bool to_later) {
  const int64_t steps = v.size(1) - 1;
  std::vector<int64_t> padding(2 * (v.dim() - 1), 0);
  padding[padding.size() - (to_later ? 1 : 2)] = 1;
  return at::constant_pad_nd(v.narrow(1, to_later ? 1 : 0, steps), padding);
}
at::Tensor of_next(const TwoSampleInputs& in, const at::Tensor& v) { return shifted(v, !in.reverse); }
at::Tensor of_last(const TwoSampleInputs& in, const at::Tensor& v) { return shifted(v, in.reverse); }

// The steps at which sequences begin and end in the order of the tensors, (batch, seqlen), bool; seq_idx counts if with_resets.
std::pair<at::Tensor, at::Tensor> sequence_bounds(const TwoSampleInputs& in, bool with_resets) {
  const int64_t batch = in.x.size(0), seqlen = in.x.size(1);
  const at::TensorOptions bools = in.x.options().dtype(at::kBool);
  // The step after the last one begins a sequence too.
  const at::Tensor begins = at::zeros({batch, seqlen + 1}, bools);
  begins.select(1, 0).fill_(true);
  begins.select(1, seqlen).fill_(true);
  if (with_resets && is_present(in.seq_idx)) begins.narrow(1, 0, seqlen).logical_or_(sequence_starts(*in.seq_idx));
  if (is_present(in.cu_seqlens)) begins.select(0, 0).index_fill_(0, in.cu_seqlens->to(at::kLong).clamp(0, seqlen), true);
  return {begins.narrow(1, 0, seqlen), begins.narrow(1, 1, seqlen)};
}

// lam as a weight, float64.
at::Tensor weight_of(const TwoSampleInputs& in, const at::Tensor& lam) {
  const at::Tensor wide = lam.to(at::kDouble);
  return in.lam_sigmoid ? wide.sigmoid() : wide;
}

// Calls visitor(method) with the method of the steps as formulas of tensors.
template <typename Visitor>
void visit_steps(Discretization discretization, const at::Tensor& lam, const Visitor& visitor) {
  visit_two_sample_discretization(discretization, MethodParameters(), [&](auto rule) {
    const auto method = rule.step(lam.defined() ? TensorValue(lam) : TensorValue(0.0));
    if constexpr (std::decay_t<decltype(method)>::kExponential) visitor(method);
  });
}

// The first step of each sequence, of (batch, seqlen, heads), and its adjoint, which adds to such a tensor.
at::Tensor take_first(const TwoSampleInputs& in, const TwoSampleGates& gates, const at::Tensor& steps) {
  if (!is_present(in.cu_seqlens)) return steps.select(1, in.reverse ? -1 : 0);
  return steps.select(0, 0).index_select(0, gates.first_steps);
}
void add_first(const TwoSampleInputs& in, const TwoSampleGates& gates, const at::Tensor& steps, const at::Tensor& first) {
  if (!is_present(in.cu_seqlens)) {
    steps.select(1, in.reverse ? -1 : 0).add_(first);
  } else {
    steps.select(0, 0).index_add_(0, gates.first_steps, at::where(gates.has_steps, first, at::zeros_like(first)));
  }
}

// (sequences, heads, ...) as (sequences, groups, heads of a group, ...).
at::Tensor by_group(const TwoSampleInputs& in, const at::Tensor& tensor) {
  return tensor.unflatten(1, {in.B.size(-2), in.x.size(2) / in.B.size(-2)});
}

// The samples before sequences that have ranks, as matrices (ranks, heads of a group and headdim) and (ranks, dstate) of each
// sequence and group; the same of the states, (heads of a group and headdim, dstate).
at::Tensor x_of_groups(const TwoSampleInputs& in, const at::Tensor& x) {
  return x.unflatten(2, {in.B.size(-2), in.x.size(2) / in.B.size(-2)}).flatten(3).transpose(1, 2);
}
at::Tensor B_of_groups(const at::Tensor& B) { return B.transpose(1, 2); }
at::Tensor states_of_groups(const TwoSampleInputs& in, const at::Tensor& states) { return by_group(in, states).flatten(2, 3); }

}  // namespace

#ifndef SSM_KERNELS_WITH_CUDA
bool has_gate_kernels(const TwoSampleInputs&) { return false; }
void two_sample_gates_cuda(const TwoSampleInputs&, Discretization, TwoSampleGates&) {}
void two_sample_gates_adjoint_cuda(const TwoSampleInputs&, Discretization, const TwoSampleGates&, const GateGrads&,
                                   const FirstStepGrads&, const TwoSampleGrads&) {}
#endif

at::Tensor TwoSampleGates::with_repeated() const {
  return is_repeated.defined() ? at::where(is_repeated, current + previous, current) : current;
}

at::Tensor starts_in_scan_order(const TwoSampleInputs& in, bool with_resets) {
  const auto [begins, ends] = sequence_bounds(in, with_resets);
  return in.reverse ? ends.flip(1) : begins;
}

namespace {

// The values of the steps: sizes, zeta, k d, m d and lam.
void evaluate_steps(const TwoSampleInputs& in, Discretization method, const at::Tensor& dt, const at::Tensor& A,
                    const at::Tensor& lam, TwoSampleGates& gates) {
  gates.steps = make_step_sizes(in.of_scan(), dt);
  gates.steps.size = gates.steps.size.to(at::kDouble);
  gates.zeta = A.to(at::kDouble);
  if (!in.premultiplied) gates.zeta = gates.steps.size * gates.zeta;
  if (lam.defined()) gates.lam = weight_of(in, lam);
  visit_steps(method, gates.lam, [&](const auto& rule) {
    const TensorValue zeta(gates.zeta);
    const auto gain = rule.gain(zeta, rule.basis(zeta));
    gates.current = gates.steps.size * gain.current.tensor;
    gates.previous = gates.steps.size * gain.previous.tensor;
  });
}

void find_first_steps(const TwoSampleInputs& in, TwoSampleGates& gates) {
  if (!is_present(in.cu_seqlens)) return;
  const at::Tensor offsets = in.cu_seqlens->to(at::kLong), begin = offsets.slice(0, 0, -1), end = offsets.slice(0, 1);
  gates.first_steps = (in.reverse ? end - 1 : begin).clamp(0, in.x.size(1) - 1);
  gates.has_steps = end.gt(begin).unsqueeze(-1);
}

}  // namespace

TwoSampleGates make_two_sample_gates(const TwoSampleInputs& in, Discretization method) {
  TwoSampleGates gates;
  if (has_gate_kernels(in)) {
    two_sample_gates_cuda(in, method, gates);
    if (!has_first_states(in)) return gates;
    find_first_steps(in, gates);
    TwoSampleGates first;
    evaluate_steps(in, method, take_first(in, gates, in.dt), has_A_of_steps(in) ? take_first(in, gates, in.A) : in.A,
                   is_present(in.lam) ? take_first(in, gates, *in.lam) : at::Tensor(), first);
    gates.first_zeta = first.zeta;
    gates.first_previous = first.previous;
    return gates;
  }
  evaluate_steps(in, method, in.dt, in.A, in.lam.value_or(at::Tensor()), gates);
  const auto [begins, ends] = sequence_bounds(in, /*with_resets=*/true);
  gates.is_last = (in.reverse ? begins : ends).unsqueeze(-1);
  const at::ScalarType accumulate = accumulate_type(in.x.scalar_type());
  const at::Tensor next_zeta = of_next(in, gates.zeta).masked_fill_(gates.is_last, 0);
  gates.next_decay = next_zeta.exp();
  if (in.repeats_first) {
    gates.is_repeated = (in.reverse ? ends : begins).unsqueeze(-1);
    // Sequences with a given sample before them do not repeat one.
    if (is_present(in.previous_x)) {
      const auto [given, given_ends] = sequence_bounds(in, /*with_resets=*/false);
      gates.is_repeated = gates.is_repeated.logical_and((in.reverse ? given_ends : given).logical_not().unsqueeze(-1));
    }
  }
  const at::Tensor current = gates.with_repeated();
  const at::Tensor shifted_gain = gates.next_decay * current + of_next(in, gates.previous).masked_fill_(gates.is_last, 0);
  gates.log_decay = next_zeta.to(accumulate);
  gates.gain = shifted_gain.to(accumulate);
  gates.diagonal_gain = current.to(accumulate);
  if (!has_first_states(in)) return gates;
  find_first_steps(in, gates);
  gates.first_zeta = take_first(in, gates, gates.zeta);
  gates.first_previous = take_first(in, gates, gates.previous);
  return gates;
}

at::Tensor first_states(const TwoSampleInputs& in, const TwoSampleGates& gates) {
  const at::ScalarType accumulate = accumulate_type(in.x.scalar_type());
  const auto factor = [&](const at::Tensor& values) { return values.to(accumulate).unsqueeze(-1).unsqueeze(-1); };
  at::Tensor states;
  if (is_present(in.initial_states)) states = *in.initial_states * factor(gates.first_zeta.exp());
  if (is_present(in.previous_x)) {
    const at::Tensor B = in.previous_B->to(accumulate);
    at::Tensor sample;
    if (in.ranks != nullptr) {
      const at::Tensor x = x_of_groups(in, in.previous_x->to(accumulate));
      sample = at::matmul(x.transpose(-2, -1), B_of_groups(B)).reshape({x.size(0), in.x.size(2), in.x.size(3), B.size(-1)});
    } else {
      const int64_t groups = B.size(-2);
      const at::Tensor x = in.previous_x->to(accumulate).unflatten(1, {groups, in.x.size(2) / groups});
      sample = (x.unsqueeze(-1) * B.unsqueeze(2).unsqueeze(3)).flatten(1, 2);
    }
    sample = sample * factor(gates.first_previous);
    states = states.defined() ? states.add_(sample) : sample;
  }
  if (!gates.has_steps.defined()) return states;
  const at::Tensor unchanged = is_present(in.initial_states) ? *in.initial_states : at::zeros_like(states);
  return at::where(gates.has_steps.unsqueeze(-1).unsqueeze(-1), states, unchanged);
}

namespace {

// Writes the gradients of initial_states, previous_x and previous_B; returns those of the first steps. A gradient is undefined
// if the states do not depend on it.
FirstStepGrads first_states_adjoint(const TwoSampleInputs& in, const TwoSampleGates& gates, const at::Tensor& grad_first_states,
                                    const TwoSampleGrads& grads) {
  const auto needs = [&](int grad) { return grads[grad].numel() > 0; };
  const at::ScalarType accumulate = accumulate_type(in.x.scalar_type());
  FirstStepGrads result;
  const auto factor = [&](const at::Tensor& values) {
    at::Tensor scale = values.to(accumulate);
    if (gates.has_steps.defined()) scale = scale.masked_fill(gates.has_steps.logical_not(), 0);
    return scale.unsqueeze(-1).unsqueeze(-1);
  };
  if (is_present(in.initial_states)) {
    at::Tensor grad = grad_first_states * factor(gates.first_zeta.exp());
    result.zeta = (grad * *in.initial_states).sum({-2, -1}).to(at::kDouble);
    if (needs(kGradInitialStates)) {
      if (gates.has_steps.defined()) {
        grad = at::where(gates.has_steps.unsqueeze(-1).unsqueeze(-1), grad, grad_first_states);
      }
      grads[kGradInitialStates].copy_(grad);
    }
  }
  if (is_present(in.previous_x) && in.ranks != nullptr) {
    const at::Tensor x = x_of_groups(in, in.previous_x->to(accumulate)), B = B_of_groups(in.previous_B->to(accumulate));
    const at::Tensor grad = states_of_groups(in, grad_first_states);
    const at::Tensor of_x = at::matmul(B, grad.transpose(-2, -1));  // without m d, as matrices
    const at::Tensor of_heads = (of_x * x).unflatten(3, {-1, in.x.size(3)}).sum(at::IntArrayRef({2, 4}));
    result.previous = of_heads.flatten(1, 2).to(at::kDouble);
    const at::Tensor scale = factor(gates.first_previous);
    if (needs(kGradPreviousX)) {
      const at::Tensor of_ranks = of_x.transpose(1, 2).reshape(in.previous_x->sizes());
      grads[kGradPreviousX].copy_(of_ranks * scale.squeeze(-1).unsqueeze(1));
    }
    if (needs(kGradPreviousB)) {
      grads[kGradPreviousB].copy_(at::matmul(x, states_of_groups(in, grad_first_states * scale)).transpose(1, 2));
    }
  } else if (is_present(in.previous_x)) {
    const at::Tensor x = by_group(in, in.previous_x->to(accumulate)), B = in.previous_B->to(accumulate);
    const at::Tensor of_B = B.unsqueeze(2).unsqueeze(3);
    const at::Tensor of_x = (by_group(in, grad_first_states) * of_B).sum(-1).flatten(1, 2);  // without m d
    result.previous = (of_x * *in.previous_x).sum(-1).to(at::kDouble);
    const at::Tensor scale = factor(gates.first_previous);
    if (needs(kGradPreviousX)) grads[kGradPreviousX].copy_(of_x * scale.squeeze(-1));
    if (needs(kGradPreviousB)) {
      const at::Tensor of_heads = by_group(in, grad_first_states * scale);
      grads[kGradPreviousB].copy_((of_heads * x.unsqueeze(-1)).sum({2, 3}));
    }
  }
  return result;
}

}  // namespace

void two_sample_gates_adjoint(const TwoSampleInputs& in, Discretization method, const TwoSampleGates& gates,
                              const GateGrads& grad_gates, const at::Tensor& grad_first_states, const TwoSampleGrads& grads) {
  FirstStepGrads first;
  if (grad_first_states.defined()) first = first_states_adjoint(in, gates, grad_first_states, grads);
  if (has_gate_kernels(in)) {
    two_sample_gates_adjoint_cuda(in, method, gates, grad_gates, first, grads);
    return;
  }
  const Inputs scan = in.of_scan();
  const auto needs = [&](int grad) { return grads[grad].numel() > 0; };
  const at::Tensor grad_gain = grad_gates.gain.to(at::kDouble);
  // The gradients of zeta through the decay, of k d, and of m d.
  const at::Tensor decayed = grad_gain * gates.next_decay;
  at::Tensor grad_current = decayed + grad_gates.diagonal_gain.to(at::kDouble);
  const at::Tensor of_next_zeta = (decayed * gates.with_repeated()).add_(grad_gates.log_decay).masked_fill_(gates.is_last, 0);
  const at::Tensor grad_zeta = of_last(in, of_next_zeta);
  const at::Tensor grad_previous = of_last(in, grad_gain.masked_fill(gates.is_last, 0));
  if (in.repeats_first) grad_previous.add_(grad_current.masked_fill(gates.is_repeated.logical_not(), 0));
  if (first.zeta.defined()) add_first(in, gates, grad_zeta, first.zeta);
  if (first.previous.defined()) add_first(in, gates, grad_previous, first.previous);

  visit_steps(method, gates.lam, [&](const auto& rule) {
    const TensorValue zeta(gates.zeta), basis = rule.basis(zeta);
    const auto derivatives = rule.derivatives(zeta, basis);
    const at::Tensor& d = gates.steps.size;
    if (needs(kGradDt) || needs(kGradDtBias)) {
      at::Tensor grad_size;
      if (in.premultiplied) {  // of k d and m d with zeta held
        const auto gain = rule.gain(zeta, basis);
        grad_size = grad_current * gain.current.tensor + grad_previous * gain.previous.tensor;
      } else {
        grad_size = through_decay(scan, grad_zeta) + grad_current * derivatives.z_gain.tensor +
                    grad_previous * derivatives.z_previous.tensor;
      }
      const at::Tensor biased = biased_grads(scan, gates.steps, grad_size);
      if (needs(kGradDt)) grads[kGradDt].copy_(biased);
      if (needs(kGradDtBias)) grads[kGradDtBias].copy_(biased.flatten(0, 1).sum(0));
    }
    if (needs(kGradA)) {
      const at::Tensor of_factors = grad_current * derivatives.gain.tensor + grad_previous * derivatives.previous.tensor;
      at::Tensor of_steps = grad_zeta + of_factors * d;
      if (!in.premultiplied) of_steps = of_steps * d;
      grads[kGradA].copy_(has_A_of_steps(in) ? of_steps : of_steps.flatten(0, 1).sum(0));
    }
    if (needs(kGradLam)) {
      at::Tensor grad_lam = d * (grad_current - grad_previous * basis.tensor);
      if (in.lam_sigmoid) grad_lam = grad_lam * gates.lam * (1 - gates.lam);
      grads[kGradLam].copy_(grad_lam);
    }
  });
}

}  // namespace ssm_kernels::ssd
