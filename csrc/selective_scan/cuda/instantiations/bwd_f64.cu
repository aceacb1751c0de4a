#include "selective_scan/cuda/bwd.cuh"
#include "selective_scan/cuda/further_bwd.cuh"

// The methods of both tables in one unit: the headers take a good part of the compiler's time for those of the second.
namespace ssm_kernels::selective_scan {

template int64_t warp_scan::shared_bytes<double>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&);
template cudaError_t launch_bwd<double>(const SelectiveScanBwdParams&, const Plan&, const PartialSums&, cudaStream_t);
template cudaError_t launch_carry_pass<double>(const SelectiveScanBwdParams&, const Plan&, cudaStream_t);
template cudaError_t launch_bwd_reduce<double>(const SelectiveScanBwdParams&, const PartialSums&, cudaStream_t);
template cudaError_t launch_further_bwd<double>(const SelectiveScanBwdParams&, const MethodParameters&, const Plan&,
                                                const PartialSums&, cudaStream_t);
template cudaError_t launch_further_carry_pass<double>(const SelectiveScanBwdParams&, const MethodParameters&, const Plan&,
                                                       cudaStream_t);

}  // namespace ssm_kernels::selective_scan
