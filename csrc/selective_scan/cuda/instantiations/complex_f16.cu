#include "selective_scan/cuda/complex_bwd.cuh"
#include "selective_scan/cuda/complex_fwd.cuh"

namespace ssm_kernels::selective_scan {

template cudaError_t launch_complex_fwd<__half>(const SelectiveScanFwdParams&, const TwoSampleParams&, cudaStream_t);
template ComplexBlocks complex_bwd_blocks<__half>(const SelectiveScanBwdParams&, int64_t);
template cudaError_t launch_complex_bwd<__half>(const SelectiveScanBwdParams&, const TwoSampleParams&, const PartialSums&,
                                                const ComplexWorkspace&, int64_t, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
