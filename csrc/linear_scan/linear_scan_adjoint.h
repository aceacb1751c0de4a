// The adjoint of linear_scan in operators that are themselves differentiable, for double backward.
#pragma once

#include "linear_scan/linear_scan_op.h"

namespace ssm_kernels::linear_scan {

// Computes all gradients, whatever bwd.needs_grad says.
GradTensors differentiable_adjoint(const BwdInputs& bwd);

}  // namespace ssm_kernels::linear_scan
