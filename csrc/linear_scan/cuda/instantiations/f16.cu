#include "linear_scan/cuda/sequential_bwd.cuh"
#include "linear_scan/cuda/sequential_fwd.cuh"
#include "linear_scan/cuda/summary.cuh"
#include "linear_scan/cuda/tile_bwd.cuh"
#include "linear_scan/cuda/tile_fwd.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_fwd<__half>(const LinearScanFwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_bwd<__half>(const LinearScanBwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_sequential_fwd<__half>(const LinearScanFwdParams&, const SequentialPartition&,
                                                               cudaStream_t);
template cudaError_t launch_linear_scan_sequential_bwd<__half>(const LinearScanBwdParams&, const SequentialPartition&,
                                                               cudaStream_t);
template cudaError_t launch_linear_scan_summary<__half>(const LinearScanSummaryParams&, const SummaryPartition&, cudaStream_t);

}  // namespace ssm_kernels::linear_scan
