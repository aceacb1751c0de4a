#include "delta_rule/cuda/fwd.cuh"
#include "delta_rule/cuda/segment_fold.cuh"

namespace ssm_kernels::delta_rule {

template cudaError_t launch_delta_rule_fwd<__nv_bfloat16>(const DeltaRuleFwdParams&, const Schedule&, bool, bool, cudaStream_t);
template cudaError_t launch_delta_rule_chunk_matrices<__nv_bfloat16>(const DeltaRuleMatricesParams&, cudaStream_t);
template cudaError_t launch_delta_rule_factors<__nv_bfloat16>(const DeltaRuleFactorsParams&, cudaStream_t);

bool has_wgmma_kernels() {
  return cuda::is_compiled_for_threads(delta_rule_fwd_sm90_kernel<__nv_bfloat16, 64, false, false>,
                                       FwdSm90<__nv_bfloat16, 64, false, false>::kThreads);
}

cudaError_t launch_delta_rule_segments(const DeltaRuleSegmentsParams& params, cudaStream_t stream) {
  return cuda::launch(delta_rule_segments_kernel, 1, cuda::kWarpSize, 0, stream, /*uses_pdl=*/false, params);
}

cudaError_t launch_delta_rule_fold(const DeltaRuleFoldParams& params, cudaStream_t stream) {
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value, kRows = kFoldRows<kColumns>;
    const int64_t blocks = params.sequences * params.heads * ((params.headdim + kRows - 1) / kRows);
    return cuda::launch(delta_rule_fold_kernel<kColumns>, blocks, kFoldThreads, 0, stream, /*uses_pdl=*/false, params);
  };
  if (is_wide(params.dstate)) return launch(std::integral_constant<int, kMaxKernelDstate>());
  return launch(std::integral_constant<int, kStateColumns>());
}

}  // namespace ssm_kernels::delta_rule
