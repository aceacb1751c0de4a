// With e the scan of (a, a grad_h) against time, begun with grad_last_state:
//
//   g_t = grad_h_t + e_{t+1}      grad_a_t = g_t h_{t-1}      grad_b_t = g_t      grad_h0 = e at the first step
//
// where beyond a sequence's ends e is grad_last_state and h is h0. In the accumulation type, whatever that of a and h, and
// whether or not there is autocast: only what is returned is rounded.

#include "linear_scan/linear_scan_adjoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "linear_scan/linear_scan_op.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::linear_scan {
namespace {

// What stands at the place after (or before) each step's own, in the order of storage; beyond the ends of a sequence its state.
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

std::tuple<std::vector<at::Tensor>, at::Tensor> differentiable_adjoint(const OptionalTensor& grad_h,
                                                                       const OptionalTensor& grad_last_state,
                                                                       const at::Tensor& a, const at::Tensor& h,
                                                                       const OptionalTensor& h0,
                                                                       const OptionalTensor& cu_seqlens, bool reverse) {
  static const auto op = find_op<FwdSignature>("ssm_kernels::_linear_recurrence");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = a.scalar_type(), wide = accumulate_type(dtype);
  const at::Tensor wide_a = a.to(wide), wide_h = h.to(wide);
  const at::Tensor grad = is_present(grad_h) ? grad_h->to(wide) : at::zeros_like(wide_h);
  const c10::SymInt sequences = is_present(cu_seqlens) ? cu_seqlens->sym_size(0) - 1 : a.sym_size(0);
  const auto or_zero = [&](const OptionalTensor& state) {
    return is_present(state) ? *state : at::zeros_symint({sequences, a.sym_size(2)}, wide_a.options());
  };
  const std::vector<at::Tensor> inputs = {wide_a, wide_a * grad};
  auto [e, grad_h0] = op.call(inputs, or_zero(grad_last_state), cu_seqlens, "linear_scan", "none", true, !reverse);
  if (a.sym_size(1) == 0) return {std::vector<at::Tensor>{at::zeros_like(a), at::zeros_like(a)}, grad_h0};
  const at::Tensor g = grad + neighbors(e, or_zero(grad_last_state), cu_seqlens, !reverse);
  const at::Tensor grad_a = g * neighbors(wide_h, or_zero(h0), cu_seqlens, reverse);
  return {std::vector<at::Tensor>{grad_a.to(dtype), g.to(dtype)}, grad_h0};
}

}  // namespace ssm_kernels::linear_scan
