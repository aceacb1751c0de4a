#include "ssd/cuda/fwd.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_ssd_rotated_fwd<__half>(const SsdRotatedFwdParams&, const Schedule&, int, cudaStream_t);

}  // namespace ssm_kernels::ssd
