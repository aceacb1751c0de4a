#include "ssd/cuda/fwd.cuh"

namespace ssm_kernels::ssd {

template int launch_ssd_fwd<__half>(const SsdFwdParams&, const Schedule&, int, cudaStream_t);

}  // namespace ssm_kernels::ssd
