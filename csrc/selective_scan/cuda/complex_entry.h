// CUDA entry points of selective_scan_two_sample for complex states, of checked inputs.
#pragma once

#include "selective_scan/two_sample_op.h"

namespace ssm_kernels::selective_scan {

FwdOutputs complex_fwd_cuda(const TwoSampleFwdInputs& in, Discretization method, const TwoSampleParams& two);

// Backward, into the gradients of bwd.
void complex_bwd_cuda(const TwoSampleBwd& bwd, const TwoSampleInputs& in, Discretization method, const TwoSampleParams& two);

}  // namespace ssm_kernels::selective_scan
