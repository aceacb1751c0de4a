#include "linear_scan/cuda/fwd.cuh"

namespace ssm_kernels::linear_scan {

template cudaError_t launch_linear_scan_fwd<double>(const LinearScanFwdParams&, const Partition&, cudaStream_t);

}  // namespace ssm_kernels::linear_scan
