#include "selective_scan/cuda/further_bwd.cuh"

namespace ssm_kernels::selective_scan {

template cudaError_t launch_further_bwd<__half>(const SelectiveScanBwdParams&, const MethodParameters&, const Plan&,
                                                const PartialSums&, cudaStream_t);
template cudaError_t launch_further_carry_pass<__half>(const SelectiveScanBwdParams&, const MethodParameters&, const Plan&,
                                                       cudaStream_t);

}  // namespace ssm_kernels::selective_scan
