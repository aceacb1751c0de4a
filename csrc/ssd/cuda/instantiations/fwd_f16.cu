#include "ssd/cuda/fwd.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_ssd_fwd<__half>(const SsdFwdParams&, const Schedule&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_fwd<__half>(const SsdLogFwdParams&, const Schedule&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_fwd<__half>(const SsdDiagonalFwdParams&, const Schedule&, Products, int, cudaStream_t);

}  // namespace ssm_kernels::ssd
