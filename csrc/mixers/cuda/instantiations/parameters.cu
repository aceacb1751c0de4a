#include "mixers/cuda/parameters.cuh"

namespace ssm_kernels::mixers {

template cudaError_t launch_mixer_parameters<float>(const MixerParametersParams&, cudaStream_t);
template cudaError_t launch_mixer_parameters<double>(const MixerParametersParams&, cudaStream_t);

}  // namespace ssm_kernels::mixers
