#include "selective_scan/cuda/summary.cuh"

namespace ssm_kernels::selective_scan {

template cudaError_t launch_fold<float>(const SelectiveScanParams&, const SegmentFold&, cudaStream_t);
template cudaError_t launch_fold<double>(const SelectiveScanParams&, const SegmentFold&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan
