// What CUDA tensors meet at an operator that has no CUDA kernel, in this release or in this build: an error that says why.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ssm_kernels {

// Boxed kernels for the CUDA key.
void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ssm_kernels
