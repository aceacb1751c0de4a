// A reverse scan of mlstm_scan as a scan of flipped steps, whose packed sequences are in the opposite order.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include "mlstm/mlstm_op.h"
#include "torch/flip.h"

namespace ssm_kernels::mlstm {
namespace {

OptionalTensor flipped_steps(const OptionalTensor& steps) {
  return is_present(steps) && steps->numel() > 0 ? OptionalTensor(flip_steps(*steps)) : steps;
}

// (sequences, ...) in the scan's order.
at::Tensor states_in_order(const Inputs& in, const at::Tensor& states) {
  return is_present(in.cu_seqlens) ? states.flip(0) : states;
}
OptionalTensor states_in_order(const Inputs& in, const OptionalTensor& states) {
  return is_present(states) ? OptionalTensor(states_in_order(in, *states)) : states;
}

Inputs in_order(const Inputs& in) {
  Inputs result = in;
  for (at::Tensor* steps : {&result.q, &result.k, &result.v, &result.i, &result.f}) *steps = flip_steps(*steps);
  result.seq_idx = flipped_steps(in.seq_idx);
  if (is_present(in.cu_seqlens)) result.cu_seqlens = in.cu_seqlens->flip(0).neg_().add_(in.q.size(1));
  for (OptionalTensor* states : {&result.initial_C, &result.initial_n, &result.initial_m}) {
    *states = states_in_order(in, *states);
  }
  result.reverse = false;
  return result;
}

}  // namespace

FwdOutputs reverse_scan(const Inputs& in) {
  FwdOutputs outputs = scan(in_order(in));
  outputs.out = flip_steps_like(outputs.out, in.v);
  if (in.normalize) outputs.divisor = flip_steps(outputs.divisor);
  for (at::Tensor* states : {&outputs.final_C, &outputs.final_n, &outputs.final_m}) *states = states_in_order(in, *states);
  return outputs;
}

GradTensors reverse_scan_bwd(const BwdInputs& given) {
  const Inputs& in = given.in;
  BwdInputs bwd = given;
  bwd.in = in_order(in);
  bwd.grad_out = flipped_steps(given.grad_out);
  bwd.divisor = flipped_steps(given.divisor);
  bwd.grad_final_C = states_in_order(in, given.grad_final_C);
  bwd.grad_final_n = states_in_order(in, given.grad_final_n);
  GradTensors grads = scan_bwd(bwd);
  const at::Tensor* const sequences[] = {&in.q, &in.k, &in.v, &in.i, &in.f};
  for (size_t grad = kGradQ; grad <= kGradF; ++grad) {
    if (in.q.size(1) > 0 && given.needs_grad[grad]) grads[grad] = flip_steps_like(grads[grad], *sequences[grad]);
  }
  for (const Grad grad : {kGradC, kGradN, kGradM}) {
    if (grads[grad].dim() > 1) grads[grad] = states_in_order(in, grads[grad]);
  }
  return grads;
}

}  // namespace ssm_kernels::mlstm
