#include "ssd/cuda/fwd.cuh"
#include "ssd/cuda/short_scan_fwd.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_ssd_fwd<float>(const SsdFwdParams&, const Schedule&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_fwd<float>(const SsdLogFwdParams&, const Schedule&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_fwd<float>(const SsdDiagonalFwdParams&, const Schedule&, Products, int, cudaStream_t);

}  // namespace ssm_kernels::ssd
