#include "torch/arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace ssm_kernels {
namespace {

void check_argument(const c10::OperatorHandle& op, const c10::Argument& argument, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    if (argument.type()->kind() != c10::TypeKind::OptionalType) check_defined(public_name(op), argument.name(), tensor);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, public_name(op), ": expected ", argument.name(),
                              " to be a dense tensor (of layout Strided), got layout ", tensor.layout());
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_nested(), public_name(op), ": expected ", argument.name(),
                              " to be a dense tensor, got a nested one");
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_quantized(), public_name(op), ": expected ", argument.name(),
                              " to be a floating-point tensor, got a quantized one: pass its dequantize()");
}

// Raises if the tensors are on several devices: one CUDA tensor among CPU tensors is dispatched here too.
void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  const at::Tensor* like = nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (like == nullptr) like = &tensor;
    TORCH_CHECK(tensor.device() == like->device(), public_name(op), ": expected ", arguments[i].name(), " on ", like->device(),
                " like the other tensors, got ", tensor.device());
  }
}

}  // namespace

std::string public_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  name.erase(0, name.find("::") + 2);
  if (name.front() == '_') name.erase(0, 1);
  for (const std::string_view suffix : {"_out", "_fwd", "_bwd", "_projected", "_two_sample"}) {
    const size_t end = name.size() - std::min(name.size(), suffix.size());
    if (name.substr(end) == suffix) name.erase(end);
  }
  return name;
}

std::string public_name(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto& schema = op.schema().arguments();
  bool subtracts_mean = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema[i].name() == "recurrence" || schema[i].name() == "layer") return arguments[i].toStringRef();
    if (schema[i].name() == "subtract_mean") subtracts_mean = arguments[i].toBool();
  }
  std::string name = op.schema().name();
  name.erase(0, name.find("::") + 2);
  if (name.front() == '_') name.erase(0, 1);
  for (const std::string_view part :
       {"_fwd", "_bwd", "_states", "_initial_gradient", "_squares", "_products", "_projected", "_two_sample", "_dense"}) {
    name.erase(std::min(name.size(), name.find(part)));
  }
  if (name == "mamba_mixer") return "Mamba";
  if (name == "mamba2_mixer") return "Mamba2";
  if (name == "norm_gated") return subtracts_mean ? "layer_norm_gated" : "rms_norm_gated";
  if (name == "add_norm") return subtracts_mean ? "add_layer_norm" : "add_rms_norm";
  return name;
}

void check_defined(std::string_view op, std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": expected ", name, " to be a tensor, got None");
}

void check_arguments(const c10::OperatorHandle& op, std::initializer_list<AnyArgument> arguments) {
  auto schema = op.schema().arguments().begin();
  for (const AnyArgument& argument : arguments) {
    if (argument.tensor != nullptr) check_argument(op, *schema, *argument.tensor);
    ++schema;
  }
}

void check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema().arguments();
  auto value = stack.end() - static_cast<int64_t>(schema.size());
  for (const c10::Argument& argument : schema) {
    if (value->isTensor()) check_argument(op, argument, value->toTensor());
    ++value;
  }
}

void no_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_arguments(op, *stack);
  const at::Tensor& first = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(false, public_name(op), ": expected CPU or CUDA tensors, got ", op.schema().arguments()[0].name(),
                              " on ", first.device());
}

void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_one_device(op, *stack);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, public_name(op),
      ": expected CPU tensors, as ssm_kernels was built without CUDA kernels, got CUDA tensors. `python -m ssm_kernels` "
      "prints the command that builds them; in a checkout, `FORCE_CUDA=1 pip install --no-deps -e .` does");
}

}  // namespace ssm_kernels
