// With e the scan of (a, a grad_h) against time, begun with grad_last_state:
//
//   g_t = grad_h_t + e_{t+1}      grad_a_t = g_t h_{t-1}      grad_b_t = g_t      grad_h0 = e at the first step
//
// where e is grad_last_state, and h is h0, beyond the ends of a sequence. All of it is computed in the accumulation type, with
// or without autocast; only the results are rounded.

#include "linear_scan/linear_scan_adjoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::linear_scan {
namespace {

// The values at the step after (or before) each step, in the order of storage; beyond the ends of a sequence, its state.
at::Tensor neighbors(const at::Tensor& x, const at::Tensor& states, const OptionalTensor& cu_seqlens, bool after) {
  const c10::SymInt seqlen = x.sym_size(1);
  const c10::SymInt from = after ? 1 : 0;
  const at::Tensor inner = x.narrow_symint(1, from, seqlen - 1);
  if (!is_present(cu_seqlens)) {
    const at::Tensor end = states.unsqueeze(1);
    return after ? at::cat({inner, end}, 1) : at::cat({end, inner}, 1);
  }
  const at::Tensor filler = x.narrow_symint(1, 0, 1);
  const at::Tensor shifted = after ? at::cat({inner, filler}, 1) : at::cat({filler, inner}, 1);
  const at::Tensor steps = at::arange(seqlen, cu_seqlens->options());
  const at::Tensor sequence = sequence_at(*cu_seqlens, steps);
  const at::Tensor boundary = cu_seqlens->index_select(0, after ? sequence.add(1) : sequence);
  const at::Tensor is_end = steps.eq(after ? boundary.sub(1) : boundary);
  return at::where(is_end.unsqueeze(1), states.index_select(0, sequence), shifted);
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
