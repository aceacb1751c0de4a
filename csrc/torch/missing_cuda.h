// What a CUDA tensor meets at an operator that has no CUDA kernel in this build: an error that says why.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

namespace ssm_kernels {

// The operator has no CUDA kernel in this release.
inline void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": this release has no CUDA kernel for this operator, only a CPU kernel; expected CPU tensors, got "
                              "CUDA tensors");
}

// The operator has a CUDA kernel, but this build does not.
inline void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": ssm_kernels was built without CUDA kernels; expected CPU tensors, got CUDA tensors. "
                              "`python -m ssm_kernels` says what was built; SSM_KERNELS_CUDA=1 pip install -e . rebuilds with CUDA");
}

}  // namespace ssm_kernels
