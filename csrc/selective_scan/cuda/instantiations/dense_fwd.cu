#include "selective_scan/cuda/dense_channel_fwd.cuh"
#include "selective_scan/cuda/dense_fwd.cuh"
#include "selective_scan/cuda/dense_reduce.cuh"

namespace ssm_kernels::selective_scan::dense {

cudaError_t launch_reduce(const ReduceParams& params, bool is_double, cudaStream_t stream) {
  return launch_reduce_kernel(params, is_double, stream);
}

cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const DenseParams& dense, ScalarKind kind, cudaStream_t stream) {
  const bool is_double = kind == ScalarKind::kDouble, is_short = params.dstate <= 16;
  if (is_double) {
    return is_short ? launch_fwd_kernel<Layout<double, 16, 1, 4>>(params, dense, kind, stream)
                    : launch_fwd_kernel<Layout<double, 32, 1, 4>>(params, dense, kind, stream);
  }
  return is_short ? channel::launch_channel_fwd_kernel(params, dense, kind, stream)
                  : launch_fwd_kernel<Layout<float, 32, 1, 4>>(params, dense, kind, stream);
}

}  // namespace ssm_kernels::selective_scan::dense
