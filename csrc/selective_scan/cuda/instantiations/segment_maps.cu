#include "selective_scan/cuda/segment_maps.cuh"

namespace ssm_kernels::selective_scan::segment_maps {

template cudaError_t launch<float>(const Params&, cudaStream_t);
template cudaError_t launch<__half>(const Params&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16>(const Params&, cudaStream_t);

}  // namespace ssm_kernels::selective_scan::segment_maps
