#include "selective_scan/cuda/dense_bwd.cuh"

namespace ssm_kernels::selective_scan::dense {

cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const DenseParams& dense, const DenseSums& sums, ScalarKind kind,
                       cudaStream_t stream) {
  const bool is_double = kind == ScalarKind::kDouble, is_short = params.dstate <= 16;
  if (is_double) {
    return is_short ? launch_bwd_kernel<Layout<double, 16, 1, 4>>(params, dense, sums, kind, stream)
                    : launch_bwd_kernel<Layout<double, 32, 1, 4>>(params, dense, sums, kind, stream);
  }
  return is_short ? launch_bwd_kernel<Layout<float, 16, 1, 4, 4>>(params, dense, sums, kind, stream)
                  : launch_bwd_kernel<Layout<float, 32, 1, 4>>(params, dense, sums, kind, stream);
}

}  // namespace ssm_kernels::selective_scan::dense
