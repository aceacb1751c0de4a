#include "torch/schemas.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/function.h>

#include "torch/arguments.h"
#include "torch/not_differentiable.h"

namespace ssm_kernels {
namespace {

std::string name_of(const std::string& schema) { return schema.substr(0, schema.find('(')); }

void refuse_missing_cuda([[maybe_unused]] torch::Library& library, [[maybe_unused]] const std::string& name) {
#ifndef SSM_KERNELS_WITH_CUDA
  implement_boxed<&built_without_cuda>(library, name, at::DispatchKey::CUDA);
#endif
}

}  // namespace

void Schemas::def(const std::string& schema) const { library_.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); }

void Schemas::below_autograd(const std::string& schema) const {
  def(schema);
  if (schema.find("!)") != std::string::npos) {  // writes to an argument, which takes no part in a graph
    library_.impl(name_of(schema).c_str(),
                  torch::dispatch(at::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
  } else {
    library_.impl(
        name_of(schema).c_str(),
        torch::dispatch(at::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&ssm_kernels::below_autograd>()));
  }
}

void Schemas::kernels(const std::string& schema) const {
  below_autograd(schema);
  refuse_missing_cuda(library_, name_of(schema));
}

void Schemas::in_place(const std::string& schema) const {
  const std::string name = name_of(schema);
  def(schema);
  refuse_missing_cuda(library_, name);
  refuse_nested(name);
  implement_boxed<&no_kernel>(library_, name, at::DispatchKey::CompositeExplicitAutograd);
}

void Schemas::refuse_nested(const std::string& name) const {
  implement_boxed<&no_kernel>(library_, name, at::DispatchKey::NestedTensorCPU);
  implement_boxed<&no_kernel>(library_, name, at::DispatchKey::NestedTensorCUDA);
}

}  // namespace ssm_kernels
