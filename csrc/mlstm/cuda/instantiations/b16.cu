#include "mlstm/cuda/gates.cuh"
#include "mlstm/cuda/normalizer.cuh"
#include "mlstm/cuda/rows.cuh"

// Both types in one unit, which share the headers and the kernels of float32 sums.
namespace ssm_kernels::mlstm {

template cudaError_t launch_mlstm_gates<__nv_bfloat16>(const GateParams&, cudaStream_t);
template cudaError_t launch_mlstm_scale_rows<__nv_bfloat16>(const RowParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<__nv_bfloat16>(const NormalizerParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<__nv_bfloat16>(const NormalizerBwdParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_gates<__half>(const GateParams&, cudaStream_t);
template cudaError_t launch_mlstm_scale_rows<__half>(const RowParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<__half>(const NormalizerParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<__half>(const NormalizerBwdParams&, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm
