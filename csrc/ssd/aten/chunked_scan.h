// The chunked scan and its adjoint as PyTorch matmuls: any device, any dtype.
#pragma once

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

FwdOutputs fwd_aten(const Inputs& in);
GradTensors bwd_aten(const BwdInputs& in);

}  // namespace ssm_kernels::ssd
