#include "linear_scan/cuda/summary.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_summary<float>(const LinearScanSummaryParams&, const SummaryPartition&, cudaStream_t);
template cudaError_t launch_linear_scan_summary<__half>(const LinearScanSummaryParams&, const SummaryPartition&, cudaStream_t);
template cudaError_t launch_linear_scan_summary<__nv_bfloat16>(const LinearScanSummaryParams&, const SummaryPartition&,
                                                               cudaStream_t);

}  // namespace ssm_kernels::linear_scan
