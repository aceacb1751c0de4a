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

}  // namespace ssm_kernels
