// Schemas of operators. TORCH_LIBRARY_FRAGMENT in an operator's folder registers them, beside the structs of their arguments:
//
//   TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
//     const Schemas schemas(library);
//     schemas.def("x(Tensor x, *, bool reverse=False) -> Tensor");
//     schemas.kernels("_x_fwd(Tensor x, bool reverse) -> Tensor");
//   }
#pragma once

#include <torch/library.h>

#include <string>

namespace ssm_kernels {

template <c10::KernelFunction::BoxedKernelFunction* function>
void implement_boxed(torch::Library& library, const std::string& name, at::DispatchKey key) {
  library.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<function>()));
}

class Schemas {
 public:
  explicit Schemas(torch::Library& library) : library_(library) {}

  // An operator whose folder registers the kernels of every dispatch key that it needs.
  void def(const std::string& schema) const;

  // An operator that autograd does not look into. Its adjoint is not differentiable: an error takes the place of wrong second
  // derivatives.
  void below_autograd(const std::string& schema) const;

  // An operator below autograd that has kernels for each device. A build without CUDA refuses CUDA tensors.
  void kernels(const std::string& schema) const;

  // An operator that writes to its arguments, has kernels for each device, and an Autograd kernel (InPlaceOp).
  void in_place(const std::string& schema) const;

  // Raises an error for nested tensors, which no Autograd kernel checks in inference mode. Operators with a composite kernel
  // need no such kernel.
  void refuse_nested(const std::string& name) const;

 private:
  torch::Library& library_;
};

}  // namespace ssm_kernels
