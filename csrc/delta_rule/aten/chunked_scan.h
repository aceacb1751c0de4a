// The delta rule in chunks and its adjoint as PyTorch matmuls: any device, any dtype.
#pragma once

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// A position of states_at that is not a multiple of the chunk ends a chunk early.
FwdOutputs fwd_aten(const Inputs& in);
GradTensors bwd_aten(const BwdInputs& bwd);

}  // namespace ssm_kernels::delta_rule
