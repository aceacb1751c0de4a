#include "torch/flip.h"

#include <algorithm>

#include "torch/allocation.h"

namespace ssm_kernels {

at::Tensor flip_steps(const at::Tensor& steps) {
  constexpr int64_t kVectorBytes = 16;
  const int64_t last = steps.dim() - 1, elements = kVectorBytes / steps.element_size();
  const auto is_aligned = [&](int64_t count) { return count % elements == 0; };
  const bool are_vectors = last > 1 && steps.stride(last) == 1 && is_aligned(steps.size(last)) &&
                           is_aligned(steps.storage_offset()) &&
                           reinterpret_cast<uintptr_t>(steps.const_data_ptr()) % kVectorBytes == 0 &&
                           std::all_of(steps.strides().begin(), steps.strides().end() - 1, is_aligned);
  return are_vectors ? steps.view(at::kComplexDouble).flip(1).view(steps.scalar_type()) : steps.flip(1);
}

at::Tensor flip_steps_like(const at::Tensor& steps, const at::Tensor& like) {
  const at::Tensor flipped = flip_steps(steps), target = empty_tensor_like(like);
  return flipped.strides() == target.strides() ? flipped : target.copy_(flipped);
}

}  // namespace ssm_kernels
