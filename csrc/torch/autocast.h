// Casts of arguments to the types that an operator computes in under autocast. The .cpp file alone includes PyTorch's header of
// autocast: it declares all of ATen, and parsing it takes as long as the rest of a unit's headers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <optional>

#include "torch/checks.h"

namespace ssm_kernels {

// The operators have autocast kernels for CPU and CUDA; tensors of other devices are never under autocast here.
bool is_under_autocast(const at::Tensor& tensor);
c10::DispatchKey autocast_key(at::DeviceType device);

// PyTorch's cached_cast: a leaf's lower-precision copy is kept for as long as autocast lasts. Tensors that are not of a
// floating-point dtype, of float64 or of another device return as they are.
at::Tensor cast_under_autocast(at::ScalarType dtype, const at::Tensor& tensor, at::DeviceType device);
std::optional<at::Tensor> cast_under_autocast(at::ScalarType dtype, const std::optional<at::Tensor>& tensor,
                                              at::DeviceType device);

struct Autocast {
  at::DeviceType device;
  at::ScalarType lower;

  explicit Autocast(at::DeviceType device);

  template <typename... Tensors>
  void to(at::ScalarType dtype, Tensors&... tensors) const {
    ((tensors = cast_under_autocast(dtype, tensors, device)), ...);
  }
  template <typename... Tensors>
  void to_lower(Tensors&... tensors) const {
    to(lower, tensors...);
  }
  template <typename... Tensors>
  void to_float(Tensors&... tensors) const {
    to(at::kFloat, tensors...);
  }
  // Casts an argument before its expansion, if it is expanded: its strides of zero stay.
  void expanded_to_lower(std::optional<at::Tensor>& tensor) const;
  // Casts parameters to float32 that do not have the dtype `kept`.
  template <typename... Tensors>
  void to_float_unless(at::ScalarType kept, Tensors&... tensors) const {
    const auto has_other_dtype = [&](const auto& tensor) {
      return is_present(tensor) && or_undefined(tensor).scalar_type() != kept;
    };
    ((has_other_dtype(tensors) ? to_float(tensors) : void()), ...);
  }
};

}  // namespace ssm_kernels
