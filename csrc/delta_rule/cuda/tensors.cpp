#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/tensors.h"

#include <ATen/ops/constant_pad_nd.h>
#include <c10/cuda/CUDAException.h>

#include "common/integers.h"
#include "torch/allocation.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::delta_rule {
namespace {

constexpr int64_t kVectorBytes = 16;

int64_t vector_elements(const at::Tensor& tensor) { return kVectorBytes / tensor.element_size(); }

bool is_aligned(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0; }

}  // namespace

bool are_vectors(const at::Tensor& tensor) {
  bool result = tensor.stride(3) == 1 && tensor.size(3) % vector_elements(tensor) == 0 && is_aligned(tensor);
  for (int64_t axis = 0; axis < 3; ++axis) {
    result &= tensor.size(axis) == 1 || (tensor.stride(axis) > 0 && tensor.stride(axis) % vector_elements(tensor) == 0);
  }
  return result;
}

at::Tensor empty_vectors(const at::Tensor& like) {
  return empty_tensor({like.size(0), like.size(1), like.size(2), round_up(like.size(3), vector_elements(like))},
                      like.options());
}

at::Tensor as_vectors(const at::Tensor& tensor) {
  if (are_vectors(tensor)) return tensor;
  const at::Tensor result = empty_vectors(tensor);
  const int64_t elements = tensor.size(3), missing = result.size(3) - elements;
  result.narrow(3, 0, elements).copy_(tensor);
  if (missing > 0) result.narrow(3, elements, missing).zero_();
  return result;
}

at::Tensor as_states(const at::Tensor& states) {
  if (states.size(3) % 2 != 0) return at::constant_pad_nd(states, {0, 1}).contiguous();
  return states.is_contiguous() && is_aligned(states) ? states : states.clone(at::MemoryFormat::Contiguous);
}

at::Tensor resets_of(const Inputs& in) {
  const at::Tensor starts = sequence_starts(*in.seq_idx).contiguous();
  if (!is_present(in.cu_seqlens)) return starts;
  // A packed sequence begins with its initial state. Those at the end may begin after the last step.
  const at::Tensor longer = at::constant_pad_nd(starts, {0, 1});
  longer.index_fill_(1, in.cu_seqlens->to(at::kLong).clamp(0, starts.size(1)), 0);
  return longer.narrow(1, 0, starts.size(1)).contiguous();
}

void describe_tiles(cuda::TmaDescriptor& descriptor, const at::Tensor& tensor) {
  const auto size = [&](int64_t dim) { return static_cast<uint64_t>(tensor.size(dim)); };
  C10_CUDA_CHECK(cuda::make_tma_descriptor(descriptor, const_cast<void*>(tensor.const_data_ptr()),
                                           {size(3), size(2), size(1), size(0)},
                                           {tensor.stride(2), tensor.stride(1), tensor.stride(0)}, {64, 1, kChunk, 1}));
}

RowsView view_of(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

}  // namespace ssm_kernels::delta_rule

#endif
