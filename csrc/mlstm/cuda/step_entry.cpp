// CUDA entry point of mlstm_step: launches on the current stream without waiting for it or reading anything from the device, so
// that it can be captured in a CUDA graph.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include "cuda/constants.h"
#include "cuda/scalar_types.h"
#include "mlstm/cuda/step_launch.h"
#include "mlstm/mlstm_step_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

namespace ssm_kernels::mlstm::step {
namespace {

// Whether rows of C are contiguous and consist of whole vectors, each at a multiple of 16 bytes.
bool has_vector_rows(const StepParams& p) {
  const int64_t bytes = cuda::element_bytes(p.state_kind);
  const auto is_aligned = [](int64_t offset) { return offset % cuda::kVectorBytes == 0; };
  return p.C.stride_column == 1 && is_aligned(reinterpret_cast<int64_t>(p.C.data)) && is_aligned(p.key_dim * bytes) &&
         is_aligned(p.C.stride_slot * bytes) && is_aligned(p.C.stride_head * bytes) && is_aligned(p.C.stride_row * bytes);
}

at::Tensor cuda(const Inputs& in) {
  check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.q.device());
  at::Tensor out = allocate_out(in);
  const StepParams params = make_params(in, out);
  if (params.rows * params.heads == 0) return out;
  const at::Tensor numbers = empty_tensor({params.rows, params.heads, kNumbers}, in.m.options());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(params.input_kind, [&](auto input) {
    using Input = decltype(input);
    if constexpr (sizeof(Input) == 2) {
      if (params.input_kind != params.state_kind) {
        return launch_mlstm_step<Input, float>(params, numbers.mutable_data_ptr(), has_vector_rows(params), stream);
      }
    }
    return launch_mlstm_step<Input, Input>(params, numbers.mutable_data_ptr(), has_vector_rows(params), stream);
  }));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { implement<&cuda>(m, "mlstm_step"); }

}  // namespace ssm_kernels::mlstm::step

#endif
