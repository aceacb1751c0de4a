// The norms' four public operators. One boxed function implements them by _norm_gated (norm_gated_op.cpp) and _add_norm
// (add_norm_op.cpp), whose argument `subtract_mean` distinguishes LayerNorm from RMSNorm.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

#include "norm/norm_call.h"
#include "torch/arguments.h"
#include "torch/dispatch.h"
#include "torch/schemas.h"

namespace ssm_kernels::norm {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // Norms, of groups of columns, with a gate or with a residual; norm/norm.h has the formulas.
  for (const std::string name : {"rms_norm_gated", "layer_norm_gated"}) {
    schemas.def(name +
                "(Tensor x, Tensor? weight, Tensor? z=None, Tensor? bias=None, *, float eps=1e-05, SymInt? group_size=None, "
                "bool norm_before_gate=False, str activation='silu') -> Tensor");
  }
  for (const std::string name : {"add_rms_norm", "add_layer_norm"}) {
    schemas.def(
        name +
        "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias=None, *, float eps=1e-05, bool residual_in_fp32=False) "
        "-> (Tensor normed, Tensor new_residual)");
  }
}

namespace {

// Implements every public operator; the handle has its name.
void public_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  check_arguments(handle, *stack);
  const std::string name = public_name(handle);
  const bool subtract_mean = name.find("layer_norm") != std::string::npos;
  auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  auto next = arguments.begin();
  if (name.rfind("add_", 0) == 0) {
    static const Operator<std::tuple<Tensor, Tensor>, AddInputs> add_norm("ssm_kernels::_add_norm");
    AddInputs in;
    in.subtract_mean = subtract_mean;
    in.x = (next++)->toTensor();
    for (OptionalTensor* tensor : {&in.residual, &in.weight, &in.bias}) *tensor = (next++)->toOptional<Tensor>();
    in.eps = (next++)->toDouble();
    in.residual_in_fp32 = next->toBool();
    auto [normed, new_residual] = add_norm(in);
    return torch::jit::push(*stack, std::move(normed), std::move(new_residual));
  }
  static const Operator<Tensor, GatedInputs> norm_gated("ssm_kernels::_norm_gated");
  GatedInputs in;
  in.subtract_mean = subtract_mean;
  in.x = (next++)->toTensor();
  for (OptionalTensor* tensor : {&in.weight, &in.z, &in.bias}) *tensor = (next++)->toOptional<Tensor>();
  in.eps = (next++)->toDouble();
  in.group_size = (next++)->toOptional<c10::SymInt>();
  in.norm_before_gate = (next++)->toBool();
  in.activation = next->toStringView();
  torch::jit::push(*stack, norm_gated(in));
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) {
  for (const char* name : {"rms_norm_gated", "layer_norm_gated", "add_rms_norm", "add_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&public_operator>());
  }
}

}  // namespace ssm_kernels::norm
