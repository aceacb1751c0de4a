// The first check of an operator's arguments: each required tensor is there, and each tensor is dense. The dispatcher looks for
// a kernel of the tensors' layout before any kernel runs, and methods of an undefined tensor raise by themselves, both with
// messages that name no argument. Public operators therefore check at their entry, with the names of their schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace ssm_kernels {

// "selective_scan" for "ssm_kernels::selective_scan", and for "_selective_scan", "_selective_scan_fwd" and
// "_selective_scan_bwd".
std::string public_name(const c10::OperatorHandle& op);

// Raises if `tensor` is undefined: a TypeError, since Python's None is what becomes an undefined tensor.
void check_defined(std::string_view op, std::string_view name, const at::Tensor& tensor);

// An argument of any type; null unless it is a tensor.
struct AnyArgument {
  const at::Tensor* tensor = nullptr;

  explicit AnyArgument(const at::Tensor& tensor) : tensor(&tensor) {}
  explicit AnyArgument(const std::optional<at::Tensor>& tensor) : tensor(tensor.has_value() ? &*tensor : nullptr) {}
  template <typename Other>
  explicit AnyArgument(const Other&) {}
};

// Raises unless each required tensor is defined, and each tensor strided: neither sparse nor nested. Takes the first arguments
// of `op`, in the order of its schema.
void check_arguments(const c10::OperatorHandle& op, std::initializer_list<AnyArgument> arguments);
// Takes all arguments, on top of the stack.
void check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Boxed kernel for tensors that no other kernel of the operator takes: says what is wrong with them.
void no_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ssm_kernels
