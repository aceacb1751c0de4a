// The interface between mlstm_scan's CUDA entry points (entry.cpp) and its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "common/kernel_abi.h"
#include "mlstm/mlstm.h"

namespace ssm_kernels::mlstm {

// Scalar is the type of q. Instantiated in instantiations/.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_gates(const GateParams& params, cudaStream_t stream);
// `has_vectors`: rows consist of vectors of 16 bytes at multiples of 16 bytes.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_scale_rows(const RowParams& params, bool has_vectors, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_mlstm_grad_products(const ProductGradParams& params, cudaStream_t stream);

}  // namespace ssm_kernels::mlstm
