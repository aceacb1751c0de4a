#include "linear_scan/cuda/summary.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_summary<double>(const LinearScanSummaryParams&, const SummaryPartition&, cudaStream_t);

}  // namespace ssm_kernels::linear_scan
