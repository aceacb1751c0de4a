// With e the scan of (a, a grad_h) against time, begun with grad_last_state:
//
//   g_t = grad_h_t + e_{t+1}      grad_a_t = g_t h_{t-1}      grad_b_t = g_t      grad_h0 = e at the first step
//
// where beyond a sequence's ends e is grad_last_state and h is h0.

#include "linear_scan/linear_scan_adjoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "linear_scan/linear_scan_op.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

namespace ssm_kernels::linear_scan {
namespace {

// What stands at the place after (or before) each step's own, in the order of storage; beyond the ends of a sequence its state.
at::Tensor neighbors(const at::Tensor& x, const at::Tensor& states, const OptionalTensor& cu_seqlens, bool after) {
  const c10::SymInt seqlen = x.sym_size(1);
  const c10::SymInt from = after ? 1 : 0;
  const at::Tensor inner = x.narrow_symint(1, from, seqlen - 1), state = states.to(x.scalar_type());
  if (!is_present(cu_seqlens)) {
    const at::Tensor end = state.unsqueeze(1);
    return after ? at::cat({inner, end}, 1) : at::cat({end, inner}, 1);
  }
  const at::Tensor filler = x.narrow_symint(1, 0, 1);
  const at::Tensor shifted = after ? at::cat({inner, filler}, 1) : at::cat({filler, inner}, 1);
  const at::Tensor steps = at::arange(seqlen, cu_seqlens->options());
  const at::Tensor sequence = sequence_at(*cu_seqlens, steps);
  const at::Tensor boundary = cu_seqlens->index_select(0, after ? sequence.add(1) : sequence);
  const at::Tensor is_end = steps.eq(after ? boundary.sub(1) : boundary);
  return at::where(is_end.unsqueeze(1), state.index_select(0, sequence), shifted);
}

}  // namespace

std::tuple<std::vector<at::Tensor>, at::Tensor> differentiable_adjoint(const OptionalTensor& grad_h,
                                                                       const OptionalTensor& grad_last_state,
                                                                       const at::Tensor& a, const at::Tensor& h,
                                                                       const OptionalTensor& h0,
                                                                       const OptionalTensor& cu_seqlens, bool reverse) {
  static const auto op = find_op<FwdSignature>("ssm_kernels::_linear_recurrence");
  const at::Tensor grad = is_present(grad_h) ? *grad_h : at::zeros_like(h);
  const c10::SymInt sequences = is_present(cu_seqlens) ? cu_seqlens->sym_size(0) - 1 : a.sym_size(0);
  const auto or_zero = [&](const OptionalTensor& state) {
    if (is_present(state)) return *state;
    return at::zeros_symint({sequences, a.sym_size(2)}, a.options().dtype(accumulate_type(a.scalar_type())));
  };
  const std::vector<at::Tensor> inputs = {a, a * grad};
  auto [e, grad_h0] = op.call(inputs, or_zero(grad_last_state), cu_seqlens, "linear_scan", "none", true, !reverse);
  if (a.sym_size(1) == 0) return {std::vector<at::Tensor>{at::zeros_like(a), at::zeros_like(a)}, grad_h0};
  const at::Tensor g = grad + neighbors(e, or_zero(grad_last_state), cu_seqlens, !reverse);
  return {std::vector<at::Tensor>{g * neighbors(h, or_zero(h0), cu_seqlens, reverse), g}, grad_h0};
}

}  // namespace ssm_kernels::linear_scan
