#include "ssd/ssd_fwd.cuh"
#include "ssd/ssd_fwd_sequential.cuh"

namespace ssm_kernels::ssd {

template int launch_ssd_fwd<float>(const SsdFwdParams&, const Schedule&, int, cudaStream_t);

}  // namespace ssm_kernels::ssd
