// The interface between mlstm_scan's CUDA entry points (entry.cpp) and its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "common/kernel_abi.h"
#include "mlstm/cuda/chunks.h"
#include "mlstm/mlstm.h"

namespace ssm_kernels::mlstm {

// Scalar is the type of q. Instantiated in instantiations/. `has_vectors`: rows consist of vectors of 16 bytes at multiples of
// 16 bytes; rows of the normalizer's q, k and their gradients then have no other strides of columns than 1.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_gates(const GateParams& params, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_scale_rows(const RowParams& params, bool has_vectors, cudaStream_t stream);
// Forward, and backward: a type that the library hides, as argument of a template, would hide its instance.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_normalizer(const NormalizerParams& params, bool has_vectors, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_normalizer(const NormalizerBwdParams& params, bool has_vectors, cudaStream_t stream);

// Whether the current device has the chunked kernels.
SSM_KERNEL_API bool has_mlstm_chunks();
// Forward, or backward, of a part of a call, of bfloat16 on compute capability 9.0a.
SSM_KERNEL_API cudaError_t launch_mlstm_chunks(const ChunkParams& params, bool is_backward, cudaStream_t stream);

}  // namespace ssm_kernels::mlstm
