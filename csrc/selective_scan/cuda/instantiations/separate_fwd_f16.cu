#include "selective_scan/cuda/separate_fwd.cuh"

namespace ssm_kernels::selective_scan {

template cudaError_t launch_separate_fwd<__half>(const SelectiveScanFwdParams&, const TwoSampleParams&, const Plan&,
                                                 cudaStream_t);

}  // namespace ssm_kernels::selective_scan
