#include "linear_scan/cuda/sequential_bwd.cuh"
#include "linear_scan/cuda/tile_bwd.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_bwd<__nv_bfloat16>(const LinearScanBwdParams&, const Partition&, cudaStream_t);
template cudaError_t launch_linear_scan_sequential_bwd<__nv_bfloat16>(const LinearScanBwdParams&, const SequentialPartition&,
                                                                      cudaStream_t);

}  // namespace ssm_kernels::linear_scan
