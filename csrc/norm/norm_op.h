// Between the norms' dispatcher-facing half (norm_call.cpp) and their devices, which see plain data alone.
#pragma once

#include "norm/norm.h"

namespace ssm_kernels::norm {

// A device's kernels. There is at least one row.
struct DeviceKernels {
  void (*fwd)(const NormFwdParams&);
  // How many partial sums bwd needs memory for; reads all of the parameters but partials and the pointers to the sums.
  int64_t (*count_partials)(const NormBwdParams&);
  void (*bwd)(const NormBwdParams&);
};

extern const DeviceKernels kCpu;
#ifdef SSM_KERNELS_WITH_CUDA
extern const DeviceKernels kCuda;
#endif

}  // namespace ssm_kernels::norm
