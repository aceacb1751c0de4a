// Backward of delta_rule_scan by the wgmma kernels of this folder.
#pragma once

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Whether the kernels take a call of CUDA tensors: one that forward's kernels take.
bool have_bwd_kernels_for(const BwdInputs& bwd);

// Checks the inputs, copies rows that are not vectors of 16 bytes and rounds normalized rows, as fwd_cuda() does. A call whose
// workspace would exceed 1 GiB runs in parts: some rows of the batch, some key heads, or some value heads of one key head. A
// call with states_at runs in pieces of time (bwd_pieces.h).
GradTensors bwd_cuda(const BwdInputs& bwd);

}  // namespace ssm_kernels::delta_rule
