#include "mamba3/cuda/rotation.cuh"

namespace ssm_kernels::mamba3 {

cudaError_t launch_phase_starts(const PhaseParams& params, cudaStream_t stream) {
  const int bytes = params.rates_of_heads != nullptr ? 0 : static_cast<int>(kPhaseChunk * params.angles * sizeof(double));
  const auto kernel = params.rates_of_heads != nullptr ? phase_sums_kernel<true> : phase_sums_kernel<false>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  const cudaError_t error = cuda::launch(kernel, params.batch * params.chunks, kPhaseThreads, bytes, stream,
                                         /*uses_pdl=*/false, params);
  return error != cudaSuccess ? error : launch_phase_scan(PhaseSums{params}, params, stream);
}

template cudaError_t launch_rotate<float>(const RotateParams&, bool, cudaStream_t);
template cudaError_t launch_rotate<__half>(const RotateParams&, bool, cudaStream_t);
template cudaError_t launch_rotate<__nv_bfloat16>(const RotateParams&, bool, cudaStream_t);

}  // namespace ssm_kernels::mamba3
