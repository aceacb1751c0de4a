// Forward of delta_rule_scan by the kernels of this folder.
#pragma once

#include <vector>

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// The kernels that take a call of CUDA tensors, which are not empty. Several updates a step and reverse scans run as other
// calls (plain_calls.h).
//
//   kSm90   with wgmma, on compute capability 9.0: fp16 or bf16, key_dim up to 256, or with one gate a channel up to 128.
//   kSm80   with mma.sync: fp32, and where kSm90 does not take them fp16 or bf16, with key_dim up to 256 and no gate a
//           channel. A block must be able to have the shared memory.
enum class Kernels { kNone, kSm80, kSm90 };
Kernels fwd_kernels_for(const Inputs& in);
// The shared memory that a block of the kernels kSm80 may have.
int sm80_shared_bytes(const Inputs& in);

// Checks the inputs. Copies rows of q, k, v and out that are not vectors of 16 bytes. In fp16 with qk_l2norm it rounds the
// normalized rows. A call with states_at or with chunk matrices of more than 1 GiB runs in spans of steps, one after another;
// few long sequences run in segments at the same time (segment_fold.cuh).
FwdOutputs fwd_cuda(const Inputs& in);

// For a plain call (plain_calls.h) with states_at: the states at each of these positions, of all rows of the batch, or with
// cu_seqlens of sequence_before() alone, (1, ...). Undefined states are zeros; those of a position at seqlen are undefined too.
// Computes nothing after the last position before seqlen.
std::vector<at::Tensor> states_at_positions(const Inputs& in);
// The index (1,) of the packed sequence of the step before a position, of which states_at has the state. The host does not read
// cu_seqlens.
at::Tensor sequence_before(const Inputs& in, int64_t position);

}  // namespace ssm_kernels::delta_rule
