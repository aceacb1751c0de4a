#include "ssd/cuda/two_sample_gates.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_two_sample_gates<float, false>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<float, false>(const TwoSampleGateBwdParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates<__half, false>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<__half, false>(const TwoSampleGateBwdParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates<__nv_bfloat16, false>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<__nv_bfloat16, false>(const TwoSampleGateBwdParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates<float, true>(const TwoSampleGateParams&, cudaStream_t);
template cudaError_t launch_two_sample_gates_bwd<float, true>(const TwoSampleGateBwdParams&, cudaStream_t);

}  // namespace ssm_kernels::ssd
