// TMA descriptors of tensors (compute capability 9.0). The host encodes a descriptor; a kernel takes it as a part of its
// parameters.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace ssm_kernels::cuda {

using TmaDescriptor = CUtensorMap;

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                     const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled of the loaded driver, with which the package does not link; null if the look-up fails. A failure is
// not cached, because it may be temporary. Its CUDA error is cleared: the next launch would report it as its own.
inline EncodeTensorMap find_encode_tensor_map() {
  static std::atomic<EncodeTensorMap> kept{nullptr};
  if (const EncodeTensorMap known = kept.load(std::memory_order_relaxed); known != nullptr) return known;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  kept.store(reinterpret_cast<EncodeTensorMap>(function), std::memory_order_relaxed);
  return reinterpret_cast<EncodeTensorMap>(function);
}

// Describes a tensor of (sizes[3], ..., sizes[0]) 16-bit elements, contiguous along the last dimension, and its tiles of
// (tile[3], ..., tile[0]) elements. strides[i] is the stride of dimension i + 1 in elements. The address and the stride of each
// dimension larger than 1 are multiples of 16 bytes. A tile has rows of 64 elements in the 128-byte swizzle of
// cuda/ptx/wgmma_sm90.cuh. No size is zero.
inline cudaError_t make_tma_descriptor(TmaDescriptor& map, void* data, const uint64_t (&sizes)[4], const int64_t (&strides)[3],
                                       const uint32_t (&tile)[4]) {
  const EncodeTensorMap encode = find_encode_tensor_map();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr uint64_t kElementBytes = 2;
  constexpr cuuint32_t kElementStrides[4] = {1, 1, 1, 1};
  cuuint64_t byte_strides[3];
  for (int i = 0; i < 3; ++i) {
    // The stride of a dimension of size 1 is never used and may be invalid: replace it by the contiguous one.
    const uint64_t contiguous = i == 0 ? sizes[0] * kElementBytes : byte_strides[i - 1] * sizes[i];
    byte_strides[i] = sizes[i + 1] == 1 ? contiguous : static_cast<uint64_t>(strides[i]) * kElementBytes;
  }
  const cuuint64_t all_sizes[4] = {sizes[0], sizes[1], sizes[2], sizes[3]};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, data, all_sizes, byte_strides, tile, kElementStrides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace ssm_kernels::cuda
