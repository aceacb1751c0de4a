// Forward of delta_rule_scan by the kernels of this folder.
#pragma once

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Whether they take a call of CUDA tensors: fp16 or bf16, key_dim up to 128, one gate a head or none, one update a step,
// forward in time, and cu_seqlens without seq_idx and states_at, on compute capability 9.0.
bool have_fwd_kernels_for(const Inputs& in);

// The inputs are checked. Rows of q, k, v and out that are not vectors of 16 bytes are copied. With qk_l2norm the normalized
// rows are rounded to the dtype.
FwdOutputs fwd_cuda(const Inputs& in);

}  // namespace ssm_kernels::delta_rule
