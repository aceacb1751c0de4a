// Derivatives that operators do not have: what their errors say, and the kernels that raise them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/edge.h>

#include <optional>
#include <string>
#include <string_view>

namespace ssm_kernels {

// "<op>: <what> is not supported; ssm_kernels.reference.<scan>, which is plain PyTorch, supports it". `op` is a public operator
// or a layer; `of` tells which scan it is if `op` is the name of a user's class.
std::string not_supported(std::string_view op, std::string_view what, std::string_view of = {});

// "forward-mode differentiation (...)", for not_supported.
extern const char kForwardMode[];

inline bool has_tangent(const at::Tensor& tensor) { return tensor.defined() && tensor._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && has_tangent(*tensor); }
bool has_tangent(at::TensorList tensors);

// Gives a result, or an argument that was written to, a node in the graph that raises an error with the message when backward
// reaches it.
void set_error_node(const at::Tensor& result, const std::string& message, const torch::autograd::edge_list& inputs);
void rebase_to_error_node(const at::Tensor& written, const std::string& message, const torch::autograd::edge_list& inputs);

// Boxed Autograd kernel of the operators below autograd, of which backward consists: their results raise an error, which names
// the public operator, when a second derivative is taken.
void below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace ssm_kernels
