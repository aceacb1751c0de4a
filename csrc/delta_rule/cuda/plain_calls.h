// Calls of delta_rule_scan in terms of calls that the kernels take, which have one update a step and run forward in time.
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

bool is_plain(const Inputs& in);

// The plain call that computes the results of a call. A reverse scan becomes one of flipped tensors, whose packed sequences
// are in the opposite order. Several updates of a step become steps: the first one has the step's decay and the others none,
// and the last one has its query and the others zeros.
Inputs plain_call(const Inputs& call);
// The results of the call, of those of its plain call.
FwdOutputs results_of(const Inputs& call, const FwdOutputs& plain);

// The same for backward.
BwdInputs plain_call(const BwdInputs& call);
// The tensors for the plain call's gradients: those of the call where both have the same elements in the same order.
GradTensors allocate_plain(const BwdInputs& call, const BwdInputs& plain, const GradTensors& grads);
// Writes the other gradients of the call, given those of the plain call.
void write_grads(const BwdInputs& call, const GradTensors& plain, const GradTensors& grads);

}  // namespace ssm_kernels::delta_rule

#endif
