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

void describe_tiles(cuda::TmaDescriptor& descriptor, const at::Tensor& tensor, int64_t rows) {
  const auto size = [&](int64_t dim) { return static_cast<uint64_t>(tensor.size(dim)); };
  C10_CUDA_CHECK(cuda::make_tma_descriptor(
      descriptor, const_cast<void*>(tensor.const_data_ptr()), {size(3), size(2), size(1), size(0)},
      {tensor.stride(2), tensor.stride(1), tensor.stride(0)}, {64, 1, static_cast<uint32_t>(rows), 1}));
}

void describe_update_tiles(cuda::TmaDescriptor& descriptor, const at::Tensor& tensor, int64_t updates) {
  const cuda::EncodeTensorMap encode = cuda::find_encode_tensor_map();
  TORCH_CHECK(encode != nullptr, "delta_rule_scan: expected a CUDA driver that describes tensors for TMA");
  const auto size = [&](int64_t dim) { return static_cast<cuuint64_t>(tensor.size(dim)); };
  // The stride of a dimension of size 1 is never used and may be invalid.
  const auto bytes = [&](int64_t dim) {
    const int64_t elements = tensor.size(dim) == 1 ? vector_elements(tensor) : tensor.stride(dim);
    return static_cast<cuuint64_t>(elements * tensor.element_size());
  };
  const cuuint64_t sizes[5] = {size(3), size(2), 1, size(1), size(0)},
                   strides[4] = {bytes(2), kVectorBytes, bytes(1), bytes(0)};
  const cuuint32_t tile[5] = {64, 1, static_cast<cuuint32_t>(updates), static_cast<cuuint32_t>(kChunk / updates), 1},
                   element_strides[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(&descriptor, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(tensor.const_data_ptr()), sizes, strides, tile,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(result == CUDA_SUCCESS, "delta_rule_scan: TMA does not describe rows of shape ", tensor.sizes());
}

RowsView view_of(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

RowsView reversed_view_of(const at::Tensor& tensor) {
  RowsView view = view_of(tensor.narrow(1, tensor.size(1) - 1, 1));
  view.stride_step = -tensor.stride(1);
  return view;
}

}  // namespace ssm_kernels::delta_rule

#endif
