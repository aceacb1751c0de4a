// Forward of delta_rule_scan by the wgmma kernels of this folder.
#pragma once

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Whether the kernels take a call of CUDA tensors: fp16 or bf16, not empty, key_dim up to 256, or with one gate a channel up to
// 128 and no seq_idx, on compute capability 9.0. Several updates a step and reverse scans run as other calls (plain_calls.h).
bool have_fwd_kernels_for(const Inputs& in);

// Checks the inputs. Copies rows of q, k, v and out that are not vectors of 16 bytes. In fp16 with qk_l2norm it rounds the
// normalized rows. A call with states_at or with chunk matrices of more than 1 GiB runs in spans of steps, one after another;
// few long sequences run in segments at the same time (segment_fold.cuh).
FwdOutputs fwd_cuda(const Inputs& in);

}  // namespace ssm_kernels::delta_rule
