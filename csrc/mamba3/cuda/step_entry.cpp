// CUDA entry point of mamba3_state_update: launches on the current stream without waiting for it or reading anything from the
// device, so that it can be captured in a CUDA graph. float64, and calls beyond the kernel's limits, run as PyTorch operators.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "mamba3/cuda/step_launch.h"
#include "mamba3/mamba3_step_op.h"
#include "torch/dispatch.h"

namespace ssm_kernels::mamba3::step {
namespace {

at::Tensor cuda(const Inputs& in) {
  check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (in.x.scalar_type() == at::kDouble) return step_aten(in);
  check_memory(in);
  at::Tensor out = allocate_out(in);
  const StepParams params = make_params(in, out);
  if (params.rows * params.heads == 0) return out;
  if (!is_supported(params, cuda::max_shared_bytes(in.x.get_device()))) return step_aten(in);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(params.input_kind, [&](auto input) {
    using Input = decltype(input);
    if constexpr (sizeof(Input) == 2) {
      if (params.ssm.kind != params.input_kind) return launch_mamba3_step<Input, float>(params, stream);
    }
    return launch_mamba3_step<Input, Input>(params, stream);
  }));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { implement<&cuda>(m, "mamba3_state_update"); }

}  // namespace ssm_kernels::mamba3::step

#endif
