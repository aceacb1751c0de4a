// Calls of delta_rule_scan in terms of calls that the kernels take, which run forward in time and count updates
// as steps.
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

bool is_plain(const Inputs& in);

// Whether the kernels take several updates a step of the call with one row of q for them (step_updates.cuh).
bool takes_updates(const Inputs& in);
// The binary logarithm of the number of updates for which q has a row.
int log2_updates(const Inputs& plain);

// The plain call that computes the results of a call. A reverse scan becomes one of flipped tensors, whose packed sequences
// are in the opposite order. cu_seqlens, seq_idx and states_at count updates. With takes_updates() q, g and their gradients
// keep a row for each step. Otherwise updates become steps: the first one of a step has its decay and the others none, and the
// last one has its query and the others zeros.
Inputs plain_call(const Inputs& call);
// The results of the call, of those of its plain call.
FwdOutputs results_of(const Inputs& call, const FwdOutputs& plain);

// The same for backward.
BwdInputs plain_call(const BwdInputs& call);
// Whether the kernels write the gradients of q, k and v of a reverse call in the opposite order of those of the plain call.
bool reverses_rows(const Inputs& call);
// The tensors for the plain call's gradients: those of the call where both have the same elements in the same order, and with
// reverses_rows() those of q, k and v.
GradTensors allocate_plain(const BwdInputs& call, const BwdInputs& plain, const GradTensors& grads);
// Writes the other gradients of the call, given those of the plain call.
void write_grads(const BwdInputs& call, const GradTensors& plain, const GradTensors& grads);

}  // namespace ssm_kernels::delta_rule

#endif
