// CUDA entry points of complex states: they allocate and launch on the current stream, and wait for the device as those of
// selective_scan do (entry.cpp).

#ifdef SSM_KERNELS_WITH_CUDA

#include "selective_scan/cuda/complex_entry.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "common/integers.h"
#include "cuda/scalar_types.h"
#include "selective_scan/cuda/call.h"
#include "selective_scan/cuda/complex_launch.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_scan {
namespace {

void check_complex_blocks(const SelectiveScanParams& p) {
  TORCH_CHECK(p.rows * p.dim <= std::numeric_limits<int32_t>::max(),
              "selective_scan: the problem is too large: expected up to 2^31 channels of all rows with a complex A, got ",
              p.rows, p.is_packed() ? " sequences" : " batch rows", " and dim = ", p.dim);
}

}  // namespace

FwdOutputs complex_fwd_cuda(const TwoSampleFwdInputs& in, Discretization method, const TwoSampleParams& two) {
  const c10::cuda::CUDAGuard guard(in.u.device());
  check_cu_seqlens(in);
  const PackedRows rows = packed_rows(in);
  FwdOutputs outputs = allocate_fwd(in);
  const SelectiveScanFwdParams params = make_fwd_params(in, method, rows, outputs);
  if (params.rows == 0 || params.dim == 0) return outputs;
  check_complex_blocks(params);
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.u.scalar_type()), [&](auto scalar) {
    return launch_complex_fwd<decltype(scalar)>(params, two, c10::cuda::getCurrentCUDAStream());
  }));
  return outputs;
}

void complex_bwd_cuda(const TwoSampleBwd& bwd, const TwoSampleInputs& in, Discretization method, const TwoSampleParams& two) {
  const c10::cuda::CUDAGuard guard(in.u.device());
  const at::Tensor states = bwd.scan.chunk_states.contiguous();
  const PackedRows rows = packed_rows(bwd.scan.in);
  const GradTensors grads = bwd.of_scan();
  const SelectiveScanBwdParams params = make_bwd_params(bwd.scan, method, rows, states, grads);
  if (params.dim == 0) {
    grads[kGradB].zero_();
    grads[kGradC].zero_();
    return;
  }
  check_complex_blocks(params);
  const int64_t shared_bytes = limits_of(in.u).shared_bytes_per_block;
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.u.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const ComplexBlocks blocks = complex_bwd_blocks<Scalar>(params, shared_bytes);
    const int64_t of_states = params.rows * params.dim * params.dstate, of_channels = params.rows * params.dim;
    const int64_t steps = ceil_div(params.seqlen, int64_t(kPartialSumSteps)) * kPartialSumSteps;
    PartialSums partial;
    partial.tiles = blocks.tiles;
    partial.chunk_stride = kPartialSumSteps;
    partial.state_stride = steps;
    partial.tile_stride = params.dstate * steps;
    partial.batch_stride = blocks.tiles * partial.tile_stride;
    ComplexWorkspace complex;
    Workspace workspace;
    workspace.reserve(&complex.adjoint, of_states);
    if (is_two_sample(method)) workspace.reserve(&complex.previous, of_states);
    if (blocks.passes > 1) workspace.reserve(&complex.sums, 4 * params.batch * params.dim * params.seqlen);
    if (params.grad_A != nullptr) workspace.reserve(&partial.grad_A, of_states);
    const auto reserve_matrix = [&](const MatrixView& grad, void** per_step, void** constant) {
      if (grad.per_step) {
        workspace.reserve(per_step, params.batch * partial.batch_stride);
      } else if (grad.data != nullptr) {
        workspace.reserve(constant, of_states);
      }
    };
    reserve_matrix(params.grad_B, &partial.grad_B, &partial.grad_constant_B);
    reserve_matrix(params.grad_C, &partial.grad_C, &partial.grad_constant_C);
    if (params.grad_D != nullptr) workspace.reserve(&partial.grad_D, of_channels);
    if (params.grad_delta_bias != nullptr) workspace.reserve(&partial.grad_delta_bias, of_channels);
    workspace.allocate(in.A.options());
    return launch_complex_bwd<Scalar>(params, two, partial, complex, shared_bytes, c10::cuda::getCurrentCUDAStream());
  }));
}

}  // namespace ssm_kernels::selective_scan

#endif
