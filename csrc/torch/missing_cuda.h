// The error for CUDA tensors in a build without CUDA kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ssm_kernels {

// Boxed kernel for the CUDA key.
void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ssm_kernels
