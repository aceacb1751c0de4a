#include "selective_scan/cuda/further_fwd.cuh"

namespace ssm_kernels::selective_scan {

template cudaError_t launch_further_fwd<double>(const SelectiveScanFwdParams&, const MethodParameters&, const Plan&,
                                                cudaStream_t);
template cudaError_t launch_further_carry_pass<double>(const SelectiveScanFwdParams&, const MethodParameters&, const Plan&,
                                                       cudaStream_t);

}  // namespace ssm_kernels::selective_scan
