#include "cuda/span_decay.cuh"

namespace ssm_kernels::cuda {

template cudaError_t launch_span_decay<float>(const SpanDecay&, cudaStream_t);
template cudaError_t launch_span_decay<double>(const SpanDecay&, cudaStream_t);
template cudaError_t launch_span_decay<__half>(const SpanDecay&, cudaStream_t);
template cudaError_t launch_span_decay<__nv_bfloat16>(const SpanDecay&, cudaStream_t);

}  // namespace ssm_kernels::cuda
