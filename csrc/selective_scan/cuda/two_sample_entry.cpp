// CUDA entry points of selective_scan_two_sample.

#ifdef SSM_KERNELS_WITH_CUDA

#include <torch/library.h>

#include "selective_scan/two_sample_op.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_scan {
namespace {

[[noreturn]] void refuse_two_samples(const TwoSampleInputs& in) {
  check_two_sample_inputs(in);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "selective_scan: discretization '", in.discretization,
                              "' reads two input samples a step, for which there are kernels on the CPU only");
  __builtin_unreachable();
}

FwdOutputs two_sample_fwd_cuda(const TwoSampleFwdInputs& in) { refuse_two_samples(in); }
TwoSampleGrads two_sample_bwd_cuda(const TwoSampleBwdInputs& bwd) { refuse_two_samples(bwd.in); }

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { register_two_sample_kernels<&two_sample_fwd_cuda, &two_sample_bwd_cuda>(m); }

}  // namespace ssm_kernels::selective_scan

#endif
