#include "selective_scan/cuda/further_fwd.cuh"
#include "selective_scan/cuda/fwd.cuh"

// The methods of both tables in one unit: the headers take a good part of the compiler's time for those of the second.
namespace ssm_kernels::selective_scan {

template int64_t warp_scan::shared_bytes<double>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&);
template cudaError_t launch_fwd<double>(const SelectiveScanFwdParams&, const Plan&, cudaStream_t);
template cudaError_t launch_carry_pass<double>(const SelectiveScanFwdParams&, const Plan&, cudaStream_t);
template cudaError_t launch_further_fwd<double>(const SelectiveScanFwdParams&, const MethodParameters&, const Plan&,
                                                cudaStream_t);
template cudaError_t launch_further_carry_pass<double>(const SelectiveScanFwdParams&, const MethodParameters&, const Plan&,
                                                       cudaStream_t);

}  // namespace ssm_kernels::selective_scan
