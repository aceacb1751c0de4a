// The chunked scan and its adjoint as PyTorch matmuls: any device, any dtype.
#pragma once

#include <string>

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

FwdOutputs fwd_aten(const Inputs& in);
// A position that is not a multiple of the chunk ends a chunk early.
StatesOutputs states_aten(const StatesInputs& in);
GradTensors bwd_aten(const BwdInputs& in);
std::string plan_aten(const Inputs& in);

}  // namespace ssm_kernels::ssd
