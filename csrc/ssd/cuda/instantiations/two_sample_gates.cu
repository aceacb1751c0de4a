#include "ssd/cuda/two_sample_gates.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_two_sample_gates<float>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<float>(const TwoSampleGateBwdParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates<__half>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<__half>(const TwoSampleGateBwdParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates<__nv_bfloat16>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<__nv_bfloat16>(const TwoSampleGateBwdParams&, cudaStream_t);

}  // namespace ssm_kernels::ssd
