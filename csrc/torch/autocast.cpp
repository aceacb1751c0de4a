// Calls PyTorch's autocast for the operators of every folder.

#include "torch/autocast.h"

#include <ATen/autocast_mode.h>

namespace ssm_kernels {

bool is_under_autocast(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && at::autocast::is_autocast_enabled(tensor.device().type());
}

c10::DispatchKey autocast_key(at::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

at::Tensor cast_under_autocast(at::ScalarType dtype, const at::Tensor& tensor, at::DeviceType device) {
  return at::autocast::cached_cast(dtype, tensor, device);
}
std::optional<at::Tensor> cast_under_autocast(at::ScalarType dtype, const std::optional<at::Tensor>& tensor,
                                              at::DeviceType device) {
  return at::autocast::cached_cast(dtype, tensor, device);
}

Autocast::Autocast(at::DeviceType device) : device(device), lower(at::autocast::get_autocast_dtype(device)) {}

void Autocast::expanded_to_lower(std::optional<at::Tensor>& tensor) const {
  if (!is_present(tensor) || tensor->layout() != at::kStrided) return to_lower(tensor);
  at::Tensor narrow = *tensor;
  for (int64_t axis = 0; axis < narrow.dim(); ++axis) {
    if (narrow.sym_stride(axis) == 0 && narrow.sym_size(axis) > 1) narrow = narrow.narrow(axis, 0, 1);
  }
  to_lower(narrow);
  tensor = narrow.expand_symint(tensor->sym_sizes());
}

}  // namespace ssm_kernels
