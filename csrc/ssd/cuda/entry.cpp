// CUDA entry points of the chunked scan. Fused kernels (fwd.cuh, bwd.cuh) run on the current stream. The fallback, ATen matmuls
// (ssd/aten/chunked_scan.h), runs fp64 calls and calls whose tiles exceed a block's shared memory. The host waits for the
// device in two cases only: forward checks the values of cu_seqlens, unless a CUDA graph is being captured, and the fallback
// copies them to the host.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>

#include "cuda/device.h"
#include "ssd/aten/chunked_scan.h"
#include "ssd/cuda/host_launch.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
FwdOutputs fwd_cuda(const Inputs& in) {
  const Discretization method = check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (!have_kernels_for(in, /*is_backward=*/false)) return fwd_aten(in);
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values("ssd_chunk_scan", in.cu_seqlens->cpu(), in.x.size(1));
  }
  const FwdOutputs outputs = allocate_fwd(in);
  const KernelInputs inputs(in, method);
  const KernelResult out = result_as_rows(outputs.out, inputs.x), final_states = inputs.result_as_states(outputs.final_states);
  launch_forward(inputs, in.z, out.written, final_states.written);
  out.finish();
  final_states.finish();
  return outputs;
}

GradTensors bwd_cuda(const BwdInputs& bwd) {
  const Discretization method = check_inputs(bwd.in);
  const c10::cuda::CUDAGuard guard(bwd.in.x.device());
  if (!have_kernels_for(bwd.in, /*is_backward=*/true)) return bwd_aten(bwd);
  const GradTensors grads = allocate_bwd(bwd);
  BwdInputs present = bwd;
  const Inputs& in = bwd.in;
  present.needs_grad[kGradD] &= is_present(in.D);
  present.needs_grad[kGradZ] &= is_present(in.z);
  present.needs_grad[kGradDtBias] &= is_present(in.dt_bias);
  present.needs_grad[kGradInitialStates] &= is_present(in.initial_states);
  launch_backward(present, method, grads);
  return grads;
}

std::string plan_cuda(const Inputs& in, bool is_backward) {
  const Discretization method = check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (!have_kernels_for(in, is_backward)) return plan_aten(in);
  return is_backward ? describe_backward(in) : describe_forward(in, method);
}

}  // namespace ssm_kernels::ssd

#endif
