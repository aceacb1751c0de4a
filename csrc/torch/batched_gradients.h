// Batched gradients, torch.autograd.grad(..., is_grads_batched=True), of operators that take lists of tensors.
//
// PyTorch computes them by an older vmap than torch.vmap, with a dispatch key of its own, and calls operators without a rule
// once for each sample; but its loop does not take lists.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ssm_kernels {

// Boxed kernel for the key Batched: one call for each sample, whose results are stacked.
void call_each_sample(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ssm_kernels
