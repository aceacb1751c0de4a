// The chunked scan and its adjoint in ATen's products: any device, any dtype.
#pragma once

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

FwdResult fwd_aten(const Inputs& in);
BwdResult bwd_aten(const BwdInputs& in);

}  // namespace ssm_kernels::ssd
