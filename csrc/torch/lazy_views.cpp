#include "torch/lazy_views.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include "torch/arguments.h"

namespace ssm_kernels {
namespace {

void resolve(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor tensor = value.toTensor();
    if (!tensor.is_neg() && !tensor.is_conj()) continue;
    const bool is_written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    TORCH_CHECK_NOT_IMPLEMENTED(!is_written, public_name(op), ": expected ", arguments[i].name(),
                                " to have its values in memory, got a lazily ", tensor.is_neg() ? "negated" : "conjugated",
                                " view: pass a copy");
    value = tensor.resolve_conj().resolve_neg();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Conjugate), stack);
}

}  // namespace

void read_lazy_views(torch::Library& m, const char* name) {
  m.impl(name, torch::CppFunction::makeFromBoxedFunction<&resolve>());
}

}  // namespace ssm_kernels
