// The first check of an operator's arguments: each required tensor is defined, and each tensor is dense. Without it, a missing
// kernel for a layout, or a method of an undefined tensor, raises an error that names no argument. Public operators therefore
// check at their entry, with the names of their schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace ssm_kernels {

// "selective_scan" for "ssm_kernels::selective_scan", "_selective_scan", "_selective_scan_fwd" and "_selective_scan_bwd", and
// "selective_state_update" for "selective_state_update_out" and "selective_state_update_two_sample".
std::string public_name(const c10::OperatorHandle& op);

// The same for a call with these arguments: internal operators serve several public ones, and mixers are named after layers.
std::string public_name(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises a TypeError if `tensor` is undefined, which is how Python's None arrives.
void check_defined(std::string_view op, std::string_view name, const at::Tensor& tensor);

// An argument of any type; null unless it is a tensor.
struct AnyArgument {
  const at::Tensor* tensor = nullptr;

  explicit AnyArgument(const at::Tensor& tensor) : tensor(&tensor) {}
  explicit AnyArgument(const std::optional<at::Tensor>& tensor) : tensor(tensor.has_value() ? &*tensor : nullptr) {}
  template <typename Other>
  explicit AnyArgument(const Other&) {}
};

// Raises unless each required tensor is defined, and each tensor strided: neither sparse, nested nor quantized. Takes the first
// arguments of `op`, in the order of its schema.
void check_arguments(const c10::OperatorHandle& op, std::initializer_list<AnyArgument> arguments);
// Takes all arguments, on top of the stack.
void check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Boxed kernel for tensors that no other kernel of the operator takes: raises an error that names the problem.
void no_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Boxed kernel for CUDA tensors in a build without CUDA kernels: raises an error that says so.
void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ssm_kernels
