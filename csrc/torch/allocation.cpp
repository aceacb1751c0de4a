// Chooses between the allocator of a device and PyTorch's operators.

#include "torch/allocation.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include "torch/eager.h"
#ifdef SSM_KERNELS_WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace ssm_kernels {
namespace {

// Whether tensors of a device may come from its allocator.
bool is_direct(at::Device device) {
#ifdef SSM_KERNELS_WITH_CUDA
  const bool has_allocator = device.is_cpu() || (device.is_cuda() && device.has_index());
#else
  const bool has_allocator = device.is_cpu();
#endif
  return has_allocator && !c10::impl::dispatch_mode_enabled() && !at::globalContext().deterministicAlgorithms();
}

at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (device.is_cuda()) return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
#endif
  return at::detail::empty_cpu(sizes, dtype);
}

at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, at::Device device) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (device.is_cuda()) return at::detail::empty_strided_cuda(sizes, strides, dtype, device);
#endif
  return at::detail::empty_strided_cpu(sizes, strides, dtype);
}

}  // namespace

at::Tensor empty_tensor(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!options.requires_grad() && !options.has_memory_format());
  const at::Device device = options.device();
  if (is_direct(device) && options.layout() == at::kStrided && !options.pinned_memory()) {
    if (const auto sizes = c10::asIntArrayRefSlowOpt(shape))
      return allocate(*sizes, c10::typeMetaToScalarType(options.dtype()), device);
  }
  return at::empty_symint(shape, options);
}

at::Tensor empty_tensor_like(const at::Tensor& tensor) {
  const at::Device device = tensor.device();
  // at::empty_like computes other strides for a tensor with gaps.
  if (is_direct(device) && is_plain_tensor(tensor) && tensor.is_non_overlapping_and_dense()) {
    return allocate(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device);
  }
  return at::empty_like(tensor);
}

at::Tensor empty_contiguous_like(const at::Tensor& tensor) {
  const at::Device device = tensor.device();
  if (is_direct(device) && is_plain_tensor(tensor)) return allocate(tensor.sizes(), tensor.scalar_type(), device);
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

at::Tensor empty_rows_like(const at::Tensor& tensor) {
  constexpr int64_t kMostSpace = 7;  // elements, of a vector of fp16
  if (tensor.dim() < 2 || tensor.stride(-1) != 1) return empty_contiguous_like(tensor);
  const int64_t columns = tensor.size(-1), row = tensor.stride(-2);
  if (row <= columns || row > columns + kMostSpace) return empty_contiguous_like(tensor);
  c10::SymDimVector shape(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  shape.back() = row;
  return empty_tensor(shape, tensor.options()).narrow(-1, 0, columns);
}

}  // namespace ssm_kernels
