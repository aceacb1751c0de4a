// Whether a differentiable operator's call needs a node of the graph: else its kernels run below autograd and save nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <optional>

namespace ssm_kernels {

// A tangent, of forward-mode differentiation, counts: Function::apply says that it is not supported.
inline bool needs_autograd(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  return (at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
}
inline bool needs_autograd(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && needs_autograd(*tensor); }

template <typename... Tensors>
bool any_needs_autograd(const Tensors&... tensors) {
  return (needs_autograd(tensors) || ...);
}

}  // namespace ssm_kernels
