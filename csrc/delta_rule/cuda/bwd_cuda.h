// Backward of delta_rule_scan by the kernels of this folder.
#pragma once

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Whether they take a call of CUDA tensors: those that forward's kernels take, without states_at.
bool have_bwd_kernels_for(const BwdInputs& bwd);

// The inputs are checked. Rows that are not vectors of 16 bytes are copied, and normalized rows rounded, as by forward. A call
// whose workspace would exceed 1 GiB runs in parts, of some rows of the batch, heads of keys or heads of values.
GradTensors bwd_cuda(const BwdInputs& bwd);

}  // namespace ssm_kernels::delta_rule
