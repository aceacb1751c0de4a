#include "ssd/cuda/bwd.cuh"
#include "ssd/cuda/span_states.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_ssd_bwd<__half>(const SsdBwdParams&, const WorkPartition&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_span_states<__half>(const SsdBwdParams&, const WorkPartition&, float*, Products, int,
                                                    cudaStream_t);
template cudaError_t launch_ssd_bwd<__half>(const SsdLogBwdParams&, const WorkPartition&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_span_states<__half>(const SsdLogBwdParams&, const WorkPartition&, float*, Products, int,
                                                    cudaStream_t);
template cudaError_t launch_ssd_bwd<__half>(const SsdDiagonalBwdParams&, const WorkPartition&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_bwd_gate<__half>(const GateBwdParams&, int, cudaStream_t);

}  // namespace ssm_kernels::ssd
