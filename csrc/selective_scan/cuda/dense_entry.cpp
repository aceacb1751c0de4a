// CUDA entry points of selective_scan_dense: they allocate and launch on the current stream, and wait for the device as those
// of selective_scan do (entry.cpp).

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "common/integers.h"
#include "selective_scan/cuda/call.h"
#include "selective_scan/cuda/dense_launch.h"
#include "selective_scan/dense_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_scan::dense {
namespace {

// Blocks that rows are divided into. More would leave more sums of rows.
constexpr int64_t kBlocks = 2048;

at::Tensor reduce_matrices(const at::Tensor& A) {
  ReduceParams params;
  params.matrices = A.size(0);
  params.dstate = A.size(1);
  const int64_t padded = padded_states(params.dstate);
  const at::Tensor schur = empty_tensor({4, params.matrices, padded, padded}, A.options());
  if (params.matrices == 0) return schur;
  params.A = A.const_data_ptr();
  params.stride_matrix = A.stride(0);
  params.stride_row = A.stride(1);
  params.stride_column = A.stride(2);
  params.result = schur.mutable_data_ptr();
  C10_CUDA_CHECK(launch_reduce(params, A.scalar_type() == at::kDouble, c10::cuda::getCurrentCUDAStream()));
  return schur;
}

DenseParams plan(const DenseInputs& in, Discretization method, const SelectiveScanParams& params, const at::Tensor& schur,
                 int64_t channels) {
  DenseParams dense = make_dense_params(in, method, params, schur, channels, params.rows);
  DenseTiles& tiles = dense.tiles;
  if (tiles.tiles > 0) tiles.slots = std::min(params.rows, ceil_div(kBlocks, tiles.tiles));
  TORCH_CHECK(tiles.tiles * tiles.slots <= std::numeric_limits<int32_t>::max(),
              "selective_scan: the problem is too large: expected fewer than 2^31 blocks of channels, got dim = ", params.dim);
  return dense;
}

FwdOutputs fwd_cuda(const DenseFwdInputs& in) {
  const Discretization method = check_dense_inputs(in);
  const c10::cuda::CUDAGuard guard(in.u.device());
  check_cu_seqlens(in);
  const PackedRows rows = packed_rows(in);
  FwdOutputs outputs = allocate_fwd(in);
  const SelectiveScanFwdParams params = make_fwd_params(in, method, rows, outputs);
  const at::Tensor schur = reduce_matrices(in.A);
  const DenseParams dense = plan(in, method, params, schur, fwd_channels(params.dstate, in.u.scalar_type() == at::kDouble));
  if (dense.tiles.tiles * dense.tiles.slots == 0) return outputs;
  C10_CUDA_CHECK(launch_fwd(params, dense, scalar_kind(in.u.scalar_type()), c10::cuda::getCurrentCUDAStream()));
  return outputs;
}

DenseGrads bwd_cuda(const DenseBwdInputs& inputs) {
  const DenseInputs& in = inputs.in;
  const Discretization method = check_dense_inputs(in);
  const c10::cuda::CUDAGuard guard(in.u.device());
  DenseBwd bwd(inputs);
  const PackedRows rows = packed_rows(bwd.two.scan.in);
  const at::Tensor states = inputs.chunk_states.contiguous();
  const SelectiveScanBwdParams params = bwd.make_params(method, rows, states);
  const at::Tensor schur = reduce_matrices(in.A);
  const DenseParams dense = plan(in, method, params, schur, bwd_channels(params.dstate));
  const DenseSums sums = bwd.allocate_sums(in, params, dense);
  if (dense.tiles.tiles * dense.tiles.slots > 0) {
    C10_CUDA_CHECK(launch_bwd(params, dense, sums, scalar_kind(in.u.scalar_type()), c10::cuda::getCurrentCUDAStream()));
  }
  return std::move(bwd).finish(in, schur);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { register_dense_kernels<&fwd_cuda, &bwd_cuda>(m); }

}  // namespace ssm_kernels::selective_scan::dense

#endif
