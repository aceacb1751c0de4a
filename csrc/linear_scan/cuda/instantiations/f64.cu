#include "linear_scan/cuda/clear_words.cuh"
#include "linear_scan/cuda/summary.cuh"
#include "linear_scan/cuda/tile_bwd.cuh"
#include "linear_scan/cuda/tile_fwd.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_fwd<double>(const LinearScanFwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_bwd<double>(const LinearScanBwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_summary<double>(const LinearScanSummaryParams&, const SummaryPartition&, cudaStream_t);

}  // namespace ssm_kernels::linear_scan
