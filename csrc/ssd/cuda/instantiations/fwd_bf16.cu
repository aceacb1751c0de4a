#include "ssd/cuda/fwd.cuh"

namespace ssm_kernels::ssd {

template cudaError_t launch_ssd_fwd<__nv_bfloat16>(const SsdFwdParams&, const Schedule&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_fwd<__nv_bfloat16>(const SsdLogFwdParams&, const Schedule&, Products, int, cudaStream_t);
template cudaError_t launch_ssd_fwd<__nv_bfloat16>(const SsdDiagonalFwdParams&, const Schedule&, Products, int, cudaStream_t);

bool has_wgmma_kernels() {
  using Gates = DiscretizedGates<__nv_bfloat16>;
  constexpr int kThreads = FwdSm90<__nv_bfloat16, 64, false, Gates>::kThreads;
  return cuda::is_compiled_for_threads(ssd_fwd_sm90_kernel<__nv_bfloat16, 64, false, Gates>, kThreads);
}

}  // namespace ssm_kernels::ssd
