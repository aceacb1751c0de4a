// CUDA entry point of selective_state_update_two_sample.

#ifdef SSM_KERNELS_WITH_CUDA

#include <torch/library.h>

#include "selective_state_update/two_sample_op.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_state_update {
namespace {

at::Tensor two_sample_step_cuda(const TwoSampleInputs& in) {
  check_inputs(in);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "selective_state_update: discretization '", in.discretization,
                              "' reads two input samples a step, for which there are kernels on the CPU only");
  return {};
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { implement<&two_sample_step_cuda>(m, "selective_state_update_two_sample"); }

}  // namespace ssm_kernels::selective_state_update

#endif
