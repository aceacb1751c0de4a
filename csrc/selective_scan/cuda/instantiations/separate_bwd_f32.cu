#include "selective_scan/cuda/separate_bwd.cuh"

namespace ssm_kernels::selective_scan {

template cudaError_t launch_separate_bwd<float>(const SelectiveScanBwdParams&, const TwoSampleParams&, const Plan&,
                                                const PartialSums&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
