// With e the scan of (a, a grad_h) against time, begun with grad_last_state:
//
//   g_t = grad_h_t + e_{t+1}      grad_a_t = g_t h_{t-1}      grad_b_t = g_t      grad_h0 = e at the first step
//
// where e is grad_last_state, and h is h0, beyond the ends of a sequence. All of it is computed in the accumulation type, with
// or without autocast; only the results are rounded.
//
// Where the next step is a reset, e_{t+1} is zero in g_t. At a reset h_{t-1} is h0, and the gradient of h0 is the sum of e over
// the resets and the first step.

#include "linear_scan/linear_scan_adjoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::linear_scan {
namespace {

// Puts `end` before the first step, or after the last, and drops the step at the other end.
at::Tensor shift(const at::Tensor& x, const at::Tensor& end, bool after) {
  const at::Tensor inner = x.narrow_symint(1, after ? 1 : 0, x.sym_size(1) - 1);
  return after ? at::cat({inner, end}, 1) : at::cat({end, inner}, 1);
}

// The values at the step after (or before) each step, in the order of storage; beyond the ends of a sequence, its state.
at::Tensor neighbors(const at::Tensor& x, const at::Tensor& states, const OptionalTensor& cu_seqlens, bool after) {
  if (!is_present(cu_seqlens)) return shift(x, states.unsqueeze(1), after);
  const at::Tensor shifted = shift(x, x.narrow_symint(1, 0, 1), after);
  const at::Tensor steps = at::arange(x.sym_size(1), cu_seqlens->options());
  const at::Tensor sequence = sequence_at(*cu_seqlens, steps);
  const at::Tensor boundary = cu_seqlens->index_select(0, after ? sequence.add(1) : sequence);
  const at::Tensor is_end = steps.eq(after ? boundary.sub(1) : boundary);
  return at::where(is_end.unsqueeze(1), states.index_select(0, sequence), shifted);
}

// The adjoint of a call with a reset mask and at least one step. e begins with zero at every cut, also with the last step,
// whose gradient therefore includes that of the last state.
GradTensors adjoint_with_resets(const Inputs& in, const at::Tensor& a, const at::Tensor& h, const at::Tensor& grad_h,
                                const at::Tensor& grad_last_state, const at::Tensor& h0) {
  const at::Tensor& reset = *in.reset;
  const at::ScalarType dtype = in.tensors[0].scalar_type();
  const c10::SymInt others = a.sym_size(1) - 1;
  const at::Tensor of_last = grad_h.narrow_symint(1, in.reverse ? c10::SymInt(0) : others, 1) + grad_last_state.unsqueeze(1);
  const at::Tensor of_others = grad_h.narrow_symint(1, in.reverse ? 1 : 0, others);
  const at::Tensor grad = in.reverse ? at::cat({of_last, of_others}, 1) : at::cat({of_others, of_last}, 1);

  const at::Tensor is_cut = shift(reset, at::zeros_like(reset.narrow_symint(1, 0, 1)), !in.reverse);
  const std::vector<at::Tensor> inputs = {a, a * grad};
  Inputs reversed;
  reversed.tensors = inputs;
  reversed.reset = is_cut;
  reversed.recurrence = "linear_scan";
  reversed.candidate_activation = "none";
  reversed.reverse = !in.reverse;
  const at::Tensor e = recurrence_op()(reversed).h;
  const at::Tensor next_e = shift(e, at::zeros_like(of_last), !in.reverse).masked_fill(is_cut.unsqueeze(2), 0);
  const at::Tensor g = grad + next_e;
  const at::Tensor initial = h0.unsqueeze(1);
  const at::Tensor before = at::where(reset.unsqueeze(2), initial, shift(h, initial, in.reverse));
  const at::Tensor inner_resets = reset.narrow_symint(1, in.reverse ? 0 : 1, others);
  const at::Tensor is_first = at::ones_like(reset.narrow_symint(1, 0, 1));
  const at::Tensor begins = in.reverse ? at::cat({inner_resets, is_first}, 1) : at::cat({is_first, inner_resets}, 1);
  const at::Tensor grad_h0 = e.masked_fill(begins.logical_not().unsqueeze(2), 0).sum(1);
  return {(g * before).to(dtype), g.to(dtype), {}, {}, grad_h0};
}

}  // namespace

GradTensors differentiable_adjoint(const BwdInputs& bwd) {
  static_assert(kMaxRecurrenceInputs == 4, "two gradients of inputs, and two that linear_scan does not have");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Inputs& in = bwd.in;
  const at::Tensor& a = in.tensors[0];
  const at::ScalarType dtype = a.scalar_type(), wide = accumulate_type(dtype);
  const at::Tensor wide_a = a.to(wide), wide_h = bwd.h.to(wide);
  const at::Tensor grad = is_present(bwd.grad_h) ? bwd.grad_h->to(wide) : at::zeros_like(wide_h);
  const auto or_zero = [&](const OptionalTensor& state) {
    return is_present(state) ? *state : at::zeros_symint({in.sequences(), a.sym_size(2)}, wide_a.options());
  };
  if (is_present(in.reset) && a.sym_size(1) != 0) {
    return adjoint_with_resets(in, wide_a, wide_h, grad, or_zero(bwd.grad_last_state), or_zero(in.h0));
  }
  const std::vector<at::Tensor> inputs = {wide_a, wide_a * grad};
  Inputs reversed;
  reversed.tensors = inputs;
  reversed.h0 = or_zero(bwd.grad_last_state);
  reversed.cu_seqlens = in.cu_seqlens;
  reversed.recurrence = "linear_scan";
  reversed.candidate_activation = "none";
  reversed.reverse = !in.reverse;
  auto [e, grad_h0] = recurrence_op()(reversed);
  if (a.sym_size(1) == 0) return {at::zeros_like(a), at::zeros_like(a), {}, {}, grad_h0};
  const at::Tensor g = grad + neighbors(e, or_zero(bwd.grad_last_state), in.cu_seqlens, !in.reverse);
  const at::Tensor grad_a = g * neighbors(wide_h, or_zero(in.h0), in.cu_seqlens, in.reverse);
  return {grad_a.to(dtype), g.to(dtype), {}, {}, grad_h0};
}

}  // namespace ssm_kernels::linear_scan
