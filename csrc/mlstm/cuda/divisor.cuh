// The divisor of the numerators of a step of mlstm_scan on CUDA, without eps.
#pragma once

#include "common/math.h"

namespace ssm_kernels::mlstm {

// max(|divisor|, floor), where a NaN of the divisor stays. `floor`: e^-m.
template <typename Acc>
__device__ __forceinline__ Acc divisor_size(Acc divisor, Acc floor) {
  const Acc size = Math<Acc>::abs(divisor);
  return size > floor || size != size ? size : floor;
}

}  // namespace ssm_kernels::mlstm
