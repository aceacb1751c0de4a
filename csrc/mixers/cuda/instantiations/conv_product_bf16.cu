#include "mixers/cuda/conv_product.cuh"

namespace ssm_kernels::mixers {

template cudaError_t launch_conv_product<__nv_bfloat16>(const ConvProductParams&, const causal_conv1d::Tiling&, int, float*,
                                                        cudaStream_t);

}  // namespace ssm_kernels::mixers
