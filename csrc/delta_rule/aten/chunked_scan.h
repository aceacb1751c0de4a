// The delta rule in chunks and its adjoint: by the CPU kernels on the CPU, as PyTorch matmuls on other devices.
#pragma once

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// A position of states_at that is not a multiple of the chunk ends a chunk early.
FwdOutputs fwd_aten(const Inputs& in);
GradTensors bwd_aten(const BwdInputs& bwd);

}  // namespace ssm_kernels::delta_rule
