// The norms' four public operators are one boxed function over _norm_gated (norm_gated_op.cpp) and _add_norm (add_norm_op.cpp),
// which tell RMSNorm and LayerNorm apart by `subtract_mean`.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <string>

#include "norm/norm_call.h"
#include "torch/arguments.h"
#include "torch/dispatch.h"

namespace ssm_kernels::norm {
namespace {

// Every public operator. Its name says which one it is.
void public_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  check_arguments(handle, *stack);
  const std::string name = public_name(handle);
  const bool subtract_mean = name.find("layer_norm") != std::string::npos;
  auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  auto next = arguments.begin();
  const Tensor x = (next++)->toTensor();
  std::array<OptionalTensor, 3> tensors;
  for (OptionalTensor& tensor : tensors) tensor = (next++)->toOptional<Tensor>();
  const double eps = (next++)->toDouble();
  if (name.rfind("add_", 0) == 0) {
    static const auto add_op = find_op<AddSignature>("ssm_kernels::_add_norm");
    auto [normed, new_residual] =
        add_op.call(x, tensors[0], tensors[1], tensors[2], eps, std::nullopt, next->toBool(), subtract_mean);
    return torch::jit::push(*stack, std::move(normed), std::move(new_residual));
  }
  const OptionalSize group_size = next->isNone() ? OptionalSize() : OptionalSize(next->toSymInt());
  const bool norm_before_gate = (++next)->toBool();
  const std::string activation = (++next)->toStringRef();
  static const auto gated_op = find_op<GatedSignature>("ssm_kernels::_norm_gated");
  torch::jit::push(*stack, gated_op.call(x, tensors[0], tensors[1], tensors[2], eps, group_size, norm_before_gate, activation,
                                         subtract_mean));
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  for (const char* name : {"rms_norm_gated", "layer_norm_gated", "add_rms_norm", "add_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&public_operator>());
  }
}

}  // namespace ssm_kernels::norm
