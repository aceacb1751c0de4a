#include "linear_scan/cuda/sequential_bwd.cuh"
#include "linear_scan/cuda/sequential_fwd.cuh"
#include "linear_scan/cuda/summary.cuh"
#include "linear_scan/cuda/tile_bwd.cuh"
#include "linear_scan/cuda/tile_fwd.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_fwd<float>(const LinearScanFwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_bwd<float>(const LinearScanBwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_sequential_fwd<float>(const LinearScanFwdParams&, const SequentialPartition&,
                                                              cudaStream_t);
template cudaError_t launch_linear_scan_sequential_bwd<float>(const LinearScanBwdParams&, const SequentialPartition&,
                                                              cudaStream_t);
template cudaError_t launch_linear_scan_summary<float>(const LinearScanSummaryParams&, const SummaryPartition&, cudaStream_t);

}  // namespace ssm_kernels::linear_scan
