// Interface between the norms' operators (norm_call.cpp) and their device code, which sees plain data only.
#pragma once

#include "norm/norm.h"

namespace ssm_kernels::norm {

// A device's kernels, for calls of at least one row.
struct DeviceKernels {
  void (*fwd)(const NormFwdParams&);
  // Returns the rows of partial sums that bwd writes. Called before `partials` and the pointers to the sums are set.
  int64_t (*count_partials)(const NormBwdParams&);
  void (*bwd)(const NormBwdParams&);
  // Whether bwd writes `out`; otherwise the caller has fwd write it, and then clears it.
  bool (*bwd_writes_out)(const NormBwdParams&);
};

extern const DeviceKernels kCpu;
#ifdef SSM_KERNELS_WITH_CUDA
extern const DeviceKernels kCuda;
#endif

}  // namespace ssm_kernels::norm
